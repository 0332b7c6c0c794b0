"""What every outlet's round is: begun, used, and finished, or given up whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from syncline.abc import Outlet, Send
from syncline.channels.pieces import Pieces


class RoundOutlet(Outlet):
    """An outlet that says how a round begins, carries a bucket, and ends."""

    @contextmanager
    def round(
        self, members: Sequence[str], sizes: Sequence[int], timeout_s: float
    ) -> Iterator[Send]:
        """Begin a round; see `Outlet.round`."""
        try:
            self._open(members, sizes, timeout_s)
            yield partial(self._send, timeout_s)
            self._finish(timeout_s)
        except BaseException:
            self._abandon()
            raise

    def reset(self) -> None:
        """Let the next round begin from nothing; see `Outlet.reset`."""
        self._abandon()

    @abstractmethod
    def _open(self, members: Sequence[str], sizes: Sequence[int], timeout_s: float) -> None:
        """Make everything ready for these members and buckets of these sizes."""

    @abstractmethod
    def _send(self, timeout_s: float, pieces: Pieces) -> None:
        """Hand over the next bucket."""

    @abstractmethod
    def _finish(self, timeout_s: float) -> None:
        """Return when all members have taken all buckets."""

    @abstractmethod
    def _abandon(self) -> None:
        """Give up what the round holds; harmless if it holds nothing."""
