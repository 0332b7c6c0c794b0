"""An engine behind a gate: its weights change only when the requests inside accept what comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from syncline.abc import Engine
from syncline.engines.passing import PassingEngine
from syncline.types import Record
from syncline.version import HeldVersion


class GatedEngine(PassingEngine):
    """Calls `before_write` right before weights change; not when an engine is filled, which serves nothing yet.

    An engine drains the records into its journal before it writes the first bit, so that is the moment
    when they end: fetching, decoding and proving them was done while requests went on. An error out of
    `before_write` leaves everything as it was.
    """

    def __init__(self, engine: Engine, before_write: Callable[[int], None]) -> None:
        super().__init__(engine)
        self._before_write = before_write

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """See `Engine.apply`."""
        self._engine.apply(self._then_wait(records, held), held)

    def _then_wait(self, records: Iterable[Record], held: HeldVersion) -> Iterator[Record]:
        yield from records
        self._before_write(held.version)
