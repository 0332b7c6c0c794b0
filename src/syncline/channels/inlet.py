"""What every inlet's round is: opened at once, used bucket by bucket, and left whole or given up."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from syncline.abc import Inlet
from syncline.types import Bits, DeviceBits

_OPENED = np.empty(0, np.uint8)


class RoundInlet(Inlet):
    """An inlet that says how a round is opened, how a bucket comes and goes, and how the round is left."""

    def buckets(self, sizes: Sequence[int]) -> Generator[Bits | DeviceBits, None, None]:
        """Take part in a round; see `Inlet.buckets`."""
        coming = self._taking(sizes)
        next(coming)  # opened: from here on closing the generator ends the round
        return coming

    def _taking(self, sizes: Sequence[int]) -> Generator[Bits | DeviceBits, None, None]:
        called = self._called()  # called off instead, what the last round has made stays
        is_whole = False
        try:
            self._open(called, sizes)
            yield _OPENED
            for _ in sizes:
                yield self._receive()
                self._release()
            is_whole = True
        finally:
            if not is_whole:
                self._leave()

    @abstractmethod
    def _called(self) -> Any:
        """Wait for the trainer to begin a round; return what it says, for `_open`."""

    @abstractmethod
    def _open(self, called: Any, sizes: Sequence[int]) -> None:
        """Make everything ready for buckets of these sizes, and say so."""

    @abstractmethod
    def _receive(self) -> Bits | DeviceBits:
        """Return the next bucket."""

    @abstractmethod
    def _release(self) -> None:
        """Let its buffer be filled again."""

    @abstractmethod
    def _leave(self) -> None:
        """Give up what the round holds; harmless if it holds nothing."""
