"""An engine that stands before another one: the base of those that add something to what it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from syncline.abc import Engine
from syncline.types import Bits, DeviceBits, Record, Span, TensorMeta
from syncline.version import HeldVersion


class PassingEngine(Engine):
    """Passes everything on to `engine`; subclasses override what they add to.

    Args:
        engine: whose weights these are; nobody else may change it meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def tensors(self) -> Mapping[str, TensorMeta]:
        """Return the engine's tensors; see `Engine.tensors`."""
        return self._engine.tensors()

    def held(self) -> HeldVersion | None:
        """Return the engine's version; see `Engine.held`."""
        return self._engine.held()

    def view(self, name: str) -> Bits:
        """Return the engine's bits; see `Engine.view`."""
        return self._engine.view(name)

    def resident(self, name: str) -> Bits | DeviceBits:
        """Return the engine's bits where they lie; see `Engine.resident`."""
        return self._engine.resident(name)

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Let the engine take a version; see `Engine.apply`."""
        self._engine.apply(records, held)

    def create(
        self,
        held: HeldVersion,
        spans: Iterable[tuple[TensorMeta, Iterable[Span]]],
        files: Mapping[str, bytes],
    ) -> None:
        """Let the engine take its first version; see `Engine.create`."""
        self._engine.create(held, spans, files)
