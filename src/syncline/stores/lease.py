"""One writer at a time in a store that cannot compare and write in one step.

The lease is a small object. Who wants it writes a claim with the next token, lets a settling time pass, and
reads it back: whoever finds its own claim holds it. A lease that has not changed for as long as it says is
over; each side measures that on its own clock, so that clocks need not agree.

What it guarantees: of two writers whose every request takes effect within the settling time, at most one writes
at a time, and a holder that was too slow finds out before it writes. What it cannot: stop a write that the
network or the service holds back for longer. Such a write can bring back an older `HEAD.json`, or replace a
part. Nobody loads a mix because of it: parts and manifests are proved by their digests, and a publisher that
finds another HEAD than its own stops.

A claim may be kept for several writes (`Lease.kept`): before each it is looked at, and made anew where it is older
than one that was just made, so that each write has as much time as with a claim of its own. Nothing has to settle
for that: the holder alone may write the lease until it is over, and those who wait see the change long before. A
holder whose look or renewal takes longer than the settling time cannot rely on that, and claims afresh.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from syncline.errors import StoreError, TransportTimeoutError, VersionConflictError
from syncline.format import strict_json

_FORMAT = "syncline-lease"
_KEYS = ("format", "format_version", "token", "owner", "lasts_ms")
_LIMIT_BYTES = 1 << 12
_NOBODY = "0" * 16
_POLLS = 4
_SEEN_SETTLES = 3
"""A renewal is seen long before the claim is over: one settling time each to look, to write, and to be read."""


@dataclass(frozen=True)
class Claim:
    """Who holds the lease.

    Attributes:
        token: rises by one with every claim, so that an older holder is told from a newer one.
        owner: 16 hexadecimal digits, made for this claim; 16 zeros: nobody.
        lasts_ms: how long the claim holds without a change.
    """

    token: int
    owner: str
    lasts_ms: int


@dataclass(frozen=True)
class _Turn:
    """A claim that is held: since when, and from when its time counts (on this side's clock, in seconds)."""

    claim: Claim
    since_s: float
    begun_s: float


class Lease:
    """The right to write, for a short time.

    Args:
        read, write: the lease's object; `read` returns None where there is none.
        lasts_s: how long a holder may take for one write; a dead one keeps others out for so long.
        settle_s: longest time that one small write may take to be seen by everybody.
        wait_s: how long `held` waits for others.
        clock, sleep: the time; tests bring their own.
    """

    def __init__(
        self,
        read: Callable[[], bytes | None],
        write: Callable[[bytes], None],
        *,
        lasts_s: float = 30.0,
        settle_s: float = 1.0,
        wait_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._read = read
        self._write = write
        self._lasts_s = lasts_s
        self._settle_s = settle_s
        self._wait_s = wait_s
        self._clock = clock
        self._sleep = sleep
        self._kept_s = lasts_s - max(lasts_s / 2, _SEEN_SETTLES * settle_s)
        self._alone = threading.Lock()
        self._turn: _Turn | None = None
        self._keepers = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let writes share a claim: none is made before the first one, the last one is let go at the end.

        After half of `lasts_s` it is let go between two writes, too, for so long that whoever waits comes first.
        """
        with self._alone:
            self._keepers += 1
        try:
            yield
        finally:
            with self._alone:
                self._keepers -= 1
                if not self._keepers:
                    self._let_go()

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Hold the lease; yields a check to make right before each write.

        The check raises `VersionConflictError` if the lease is over or another's: do not write then.

        Raises:
            TransportTimeoutError: another held it for all of `wait_s`.
        """
        with self._alone:
            try:
                turn = self._carried_on()
                yield lambda: self._check(turn)
            finally:
                if not self._keepers:
                    self._let_go()

    def _carried_on(self) -> _Turn:
        """Go on with the claim that is held, where that takes nobody's turn; else make one."""
        if self._turn is not None:
            renewed = self._renewed(self._turn)
            if renewed is None:
                self._let_go()
                self._sleep(self._settle_s)  # who waits looks more often, and claims meanwhile
            self._turn = renewed
        if self._turn is None:
            begun_s, claim = self._claim()
            self._turn = _Turn(claim, begun_s, begun_s)
        return self._turn

    def _renewed(self, turn: _Turn) -> _Turn | None:
        """Give a write as much time as after a new claim; None if the turn is over."""
        now_s = self._clock()
        if now_s >= turn.since_s + self._kept_s:
            return None
        if now_s <= turn.begun_s + self._settle_s:
            return turn  # as young as one that has just settled; the check looks whether it stands
        found = self._found()
        if found.owner != turn.claim.owner or self._clock() > now_s + self._settle_s:
            return None  # another's, or looked at so long ago that it may be by now
        # One above what is there: a renewal whose answer was lost may be, and who waits must see a change.
        claim = replace(turn.claim, token=found.token + 1)
        self._write(_dump(claim))
        if self._clock() > now_s + 2 * self._settle_s:
            return None  # it may have come down on another's claim
        return _Turn(claim, turn.since_s, now_s)

    def _check(self, turn: _Turn) -> None:
        left_s = self._lasts_s - self._settle_s - (self._clock() - turn.begun_s)
        found, mine = self._found(), turn.claim
        if left_s <= 0 or found != mine:
            raise VersionConflictError(
                f"the store's lease: expected token {mine.token} of owner {mine.owner} with time left, "
                f"found token {found.token} of owner {found.owner} and {left_s:.1f} s left; nothing was "
                "written; try again"
            )

    def _let_go(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        with suppress(StoreError):  # then it is over by itself; the error before it is what matters
            found = self._found()
            if found.owner == turn.claim.owner:  # whatever became of the last renewal
                self._write(_dump(replace(found, owner=_NOBODY)))

    def _claim(self) -> tuple[float, Claim]:
        end = self._clock() + self._wait_s
        while True:
            found = self._until_free(end)
            begun_at = self._clock()
            mine = Claim(found.token + 1, secrets.token_hex(8), round(self._lasts_s * 1000))
            self._write(_dump(mine))
            self._sleep(self._settle_s)
            if self._found() == mine:
                return begun_at, mine

    def _until_free(self, end: float) -> Claim:
        found = self._found()
        since = self._clock()
        while found.owner != _NOBODY and self._clock() < since + found.lasts_ms / 1000:
            if self._clock() >= end:
                raise TransportTimeoutError(
                    f"the store's lease: expected it to be free within {self._wait_s} s, found it held by owner "
                    f"{found.owner} with token {found.token}; another publisher writes here, or died less than "
                    f"{found.lasts_ms / 1000:.0f} s ago"
                )
            self._sleep(self._settle_s / _POLLS)
            seen, found = found, self._found()
            if seen != found:
                since = self._clock()
        return found

    def _found(self) -> Claim:
        raw = self._read()
        return Claim(0, _NOBODY, 0) if raw is None else _load(raw)


def _dump(claim: Claim) -> bytes:
    return strict_json.dump(
        {
            "format": _FORMAT,
            "format_version": 1,
            "token": claim.token,
            "owner": claim.owner,
            "lasts_ms": claim.lasts_ms,
        }
    )


def _load(raw: bytes) -> Claim:
    fields = strict_json.document(
        raw, "the store's lease", _FORMAT, _KEYS, limit_bytes=_LIMIT_BYTES
    )
    return Claim(fields.integer("token"), fields.text("owner"), fields.integer("lasts_ms"))
