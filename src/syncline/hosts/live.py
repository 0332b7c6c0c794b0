"""An engine that serves its own weights to those that join, without a copy and without being asked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import numpy as np

from syncline.abc import ByteArray, Engine
from syncline.engines.passing import PassingEngine
from syncline.errors import ConfigError
from syncline.hosts.host import Space, VersionHost
from syncline.hosts.offer import Catalog, Offer, Stored
from syncline.types import Bits, Record, Span, TensorMeta
from syncline.version import HeldVersion


class LiveEngine(PassingEngine):
    """An engine that offers whatever version it holds; use it in place of the one that it is made from.

    Args:
        host: whose transports read the weights. With a `SharedPeer` among them the weights must come from the
            host: `MemoryEngine(allocate=host.bits)`.
        engine: must keep its weights where they are, in host memory, and `view` them there.

    While the engine takes a version the generation of its memory is odd, so nobody reads a mix unnoticed.

    Raises:
        ConfigError: `view` does not return the live weights (they lie on a GPU, or are not contiguous): use
            `VersionHost.register`, which copies.
    """

    def __init__(self, host: VersionHost, engine: Engine) -> None:
        super().__init__(engine)
        self._host = host
        self._space: Space | None = None
        self._offered: str | None = None
        self._views: list[Bits] = []
        self._announce()

    def offer(self) -> Offer:
        """Return the offer of the version that the engine holds.

        Raises:
            ConfigError: it holds none, or is taking one at the moment.
        """
        if self._offered is None:
            raise ConfigError("the engine offers no version: it holds none, or is taking one")
        return self._host.offer(self._offered)

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Take a version; see `Engine.apply`. What is drained first is no change: it is offered until then."""
        try:
            super().apply(self._closing_after(records), held)
        except BaseException:
            if self._offered is None:
                self._announce()
            raise
        self._withdraw()
        self._announce()

    def create(
        self,
        held: HeldVersion,
        spans: Iterable[tuple[TensorMeta, Iterable[Span]]],
        files: Mapping[str, bytes],
    ) -> None:
        """Take a whole version; see `Engine.create`."""
        super().create(held, spans, files)
        self._announce()

    def _closing_after(self, records: Iterable[Record]) -> Iterable[Record]:
        """Pass the records on, and withdraw the offer at their end: then the engine begins to write."""
        yield from records
        self._withdraw()

    def _withdraw(self) -> None:
        if self._offered is not None:
            offered, self._offered = self._offered, None
            self._host.withdraw(offered)

    def _announce(self) -> None:
        held = self._engine.held()
        if held is None:
            return
        names = sorted(self._engine.tensors())
        if self._space is None:
            self._space = self._host.space({f"t{i}": self._live(n) for i, n in enumerate(names)})
        metas = self._engine.tensors()
        stored = {
            name: Stored(metas[name], self._space.region(f"t{number}"), 0)
            for number, name in enumerate(names)
        }
        self._host.announce(self._space, Catalog(held, stored, {}))
        self._offered = held.sha256

    def _live(self, name: str) -> ByteArray:
        """Return the memory of a tensor's live bits, to be registered and never written."""
        view = self._engine.view(name)
        if not view.size:
            return self._host.allocate(0)
        root = view
        while isinstance(root.base, np.ndarray):
            root = root.base
        again = self._engine.view(name)
        if not root.flags.writeable or again.ctypes.data != view.ctypes.data:
            raise ConfigError(
                f"tensor {name!r}: the engine does not show its live memory; use VersionHost.register, which "
                "copies the weights"
            )
        self._views.append(view)  # the array below does not keep the memory
        live = (ctypes.c_uint8 * view.nbytes).from_address(int(view.ctypes.data))
        return np.frombuffer(memoryview(live), np.uint8)
