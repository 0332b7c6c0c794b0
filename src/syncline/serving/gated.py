"""An engine behind a gate: its weights change only when the requests inside accept what comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from syncline.abc import Engine
from syncline.types import Bits, Record, Span, TensorMeta
from syncline.version import HeldVersion


class GatedEngine(Engine):
    """Passes everything on to `engine`, and calls `before_write` right before weights change.

    An engine drains the records into its journal before it writes the first bit, so that is the moment
    when they end: fetching, decoding and proving them was done while requests went on. An error out of
    `before_write` leaves everything as it was.
    """

    def __init__(self, engine: Engine, before_write: Callable[[int], None]) -> None:
        self._engine = engine
        self._before_write = before_write

    def tensors(self) -> Mapping[str, TensorMeta]:
        """See `Engine.tensors`."""
        return self._engine.tensors()

    def held(self) -> HeldVersion | None:
        """See `Engine.held`."""
        return self._engine.held()

    def view(self, name: str) -> Bits:
        """See `Engine.view`."""
        return self._engine.view(name)

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """See `Engine.apply`."""
        self._engine.apply(self._then_wait(records, held), held)

    def create(
        self,
        held: HeldVersion,
        spans: Iterable[tuple[TensorMeta, Iterable[Span]]],
        files: Mapping[str, bytes],
    ) -> None:
        """See `Engine.create`: nothing is served yet, so nobody need be waited for."""
        self._engine.create(held, spans, files)

    def _then_wait(self, records: Iterable[Record], held: HeldVersion) -> Iterator[Record]:
        yield from records
        self._before_write(held.version)
