"""What a replica needs of an engine: to bring it to a version, and to know what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from syncline.abc import Engine, Observe, Store
from syncline.serving.gated import GatedEngine
from syncline.sync import Receiver
from syncline.version import HeldVersion


@runtime_checkable
class Puller(Protocol):
    """An engine that fetches versions by itself and only has to be told, such as a vLLM server."""

    def sync(self, version: int | None, *, repair: bool = False) -> object:
        """Bring it to a version, by default the store's current one; as `Receiver.sync` fails."""

    def held(self) -> HeldVersion | None:
        """Return the version that it serves; None if that is not known."""

    def is_serving(self) -> bool:
        """Tell whether it still serves what `held` says; cheap, and asked often."""

    def figures(self) -> Mapping[str, float]:
        """Return what it measured, by name of a metric."""


class EnginePuller:
    """An engine in this process, and the receiver that pulls for it.

    Args:
        before_write: called with the number of a version right before the weights change.
    """

    def __init__(
        self, store: Store, engine: Engine, before_write: Callable[[int], None], observe: Observe
    ) -> None:
        self._engine = engine
        self._receiver = Receiver(store, GatedEngine(engine, before_write), observe=observe)

    def sync(self, version: int | None, *, repair: bool = False) -> object:
        """See `Receiver.sync`."""
        return self._receiver.sync(version, repair=repair)

    def held(self) -> HeldVersion | None:
        """See `Engine.held`."""
        return self._engine.held()

    def is_serving(self) -> bool:
        """Return True: nobody else changes it."""
        return True

    def figures(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}
