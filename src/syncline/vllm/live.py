"""What a worker's live weights must be able to do, whatever way they are written."""

from __future__ import annotations

from typing import Protocol

from syncline.types import Fingerprint
from syncline.vllm.copy import HostCopy


class LiveWeights(Protocol):
    """The weights of one worker of a running engine."""

    def prepare(self, copy: HostCopy) -> None:
        """Do what can be done for `write` while the engine generates; reads live weights, writes none.

        Called in another thread than the rest, after every staging; what an earlier call prepared is void.
        """

    def write(self, copy: HostCopy, *, everything: bool = False) -> None:
        """Make the live weights hold what the copy holds; they differ by `copy.pending` alone.

        Args:
            everything: they may differ anywhere, after an update that was torn.

        Raises:
            TornUpdateError: it failed, and so did putting the old bits back.
            Exception: it failed, and every bit is as it was.
        """

    def undo(self, copy: HostCopy) -> None:
        """Put back what the last `write` replaced; may be repeated, and follow a `write` that failed."""

    def fingerprint(self, copy: HostCopy) -> Fingerprint:
        """Return this worker's share of the model's fingerprint, read from its live weights.

        Over all workers the shares add up to the manifest's: what several of them hold counts once.
        """

    def settle(self) -> None:
        """Forget how to undo."""
