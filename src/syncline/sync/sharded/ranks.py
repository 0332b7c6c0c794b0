"""How the ranks of a trainer talk: messages with a deadline, and steps that all of them take or none.

Every wait ends: with the message, with what went wrong on the other rank, or with an error that names the
rank that is missing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Self

from syncline import errors
from syncline.abc import Channel
from syncline.channels import MemoryChannel
from syncline.channels.torch_ranks import torch_rank_channels
from syncline.errors import (
    ConfigError,
    OutcomeUnknownError,
    PeerLostError,
    SynclineError,
    TransportTimeoutError,
)

LEADER = 0
"""The rank that commits."""

# To each other ranks send data or a fault, to the leader a result or why there is none; it answers all.
_DATA, _FAULT = b"D", b"E"
_RESULT, _NO_RESULT = b"R", b"N"
_ANSWER, _FAILED, _UNKNOWN = b"A", b"F", b"U"
_ANSWERS = (_ANSWER, _FAILED, _UNKNOWN)
_HEARD = b"H"
_ATTEMPT_BYTES = 8
_LEADER_WAITS, _RANKS_WAIT = 2, 4


class Ranks:
    """This process among the ranks of a trainer.

    Args:
        rank: this process.
        channels: to every other rank, by its number; ranks count from 0 without a gap.
        timeout_s: the longest that one rank waits for another to read, encode and upload its share of a
            version. The leader waits twice as long for a rank's result, ranks four times as long for the
            leader's, so that who waits for a missing rank itself is the first to say so.

    Example:
        >>> zero, one = Ranks.threads(2)
        >>> zero.send(1, b"ready")
        >>> one.receive(0, "its readiness")
        b'ready'
    """

    def __init__(
        self, rank: int, channels: Mapping[int, Channel], *, timeout_s: float = 600.0
    ) -> None:
        if sorted([rank, *channels]) != list(range(len(channels) + 1)):
            raise ConfigError(
                f"ranks: rank {rank} with channels to {sorted(channels)}: expected one to every other "
                "rank, counted from 0"
            )
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s: expected more than 0, found {timeout_s}")
        self.rank = rank
        self.size = len(channels) + 1
        self.timeout_s = timeout_s
        self._channels = channels
        self._own: deque[tuple[bytes, bytes]] = deque()
        self._early: tuple[bytes, bytes] | None = None
        self._attempt = 0

    @classmethod
    def threads(cls, size: int, *, timeout_s: float = 600.0) -> list[Self]:
        """Return `size` ranks that live in threads of this process."""
        ends: list[dict[int, Channel]] = [{} for _ in range(size)]
        for low in range(size):
            for high in range(low + 1, size):
                ends[low][high], ends[high][low] = MemoryChannel.pair()
        return [cls(rank, channels, timeout_s=timeout_s) for rank, channels in enumerate(ends)]

    @classmethod
    def torch(cls, *, timeout_s: float = 600.0) -> Self:
        """Return this process's rank in `torch.distributed`, whose default group must be initialised.

        Makes a Gloo group and a key-value store of its own, whatever backend the trainer uses.
        Collective: yes.
        """
        rank, channels = torch_rank_channels(timeout_s)
        return cls(rank, channels, timeout_s=timeout_s)

    @property
    def is_leader(self) -> bool:
        """Whether this rank commits."""
        return self.rank == LEADER

    def send(self, to: int, *body: bytes) -> None:
        """Hand a message, in one piece or several, to a rank, which may be this one.

        Raises:
            PeerLostError: the rank is gone.
        """
        self._send(to, _DATA, *body)

    def receive(self, source: int, what: str, *, deadline_s: float | None = None) -> bytes:
        """Return the next message of a rank that belongs to the present step.

        Args:
            what: what the rank was to send, for the error.
            deadline_s: by `time.monotonic`, until when to wait; None: `timeout_s` from now.

        Raises:
            TransportTimeoutError: it did not come in that time; names the rank.
            PeerLostError: the rank is gone; names it.
            SynclineError: the rank failed; of the kind that it failed with, and says how.
        """
        if deadline_s is None:
            deadline_s = time.monotonic() + self.timeout_s
        kind, body = self._next(source, what, deadline_s, (_DATA, _FAULT, *_ANSWERS))
        if kind in _ANSWERS:
            self._early = (kind, body)
        return self._body(source, kind, body)

    def together(
        self,
        local: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        *,
        waiting: Collection[int] = (),
        on_failure: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Take one step on all ranks: each does `local`, the leader makes of the results one answer.

        Args:
            local: what this rank does; its result goes to the leader.
            decide: what the leader makes of all results, by rank; no rank gets another answer.
            waiting: ranks that `local` of this rank sends to: they are told if it fails.
            on_failure: what the leader does before it tells the ranks of a failure.

        Returns:
            the leader's answer.

        Raises:
            OutcomeUnknownError: the leader is gone, or could not find out itself what it did.
            SynclineError: `local` failed on a rank, or `decide` did. All ranks raise; the one that failed
                raises what happened to it.

        Collective: yes.
        """
        self._attempt += 1
        self._own.clear()
        self._early = None
        failure: Exception | None = None
        try:
            result = local()
        except BaseException as error:
            self._tell(waiting, error)
            if not isinstance(error, Exception):
                raise
            failure = error
        else:
            self._send(LEADER, _RESULT, result)
        if self.is_leader:
            self._lead(decide, on_failure)
        try:
            return self._answer()
        except SynclineError as error:
            if failure is None or isinstance(error, OutcomeUnknownError):
                raise
            raise failure from None

    def _answer(self) -> bytes:
        deadline_s = time.monotonic() + _RANKS_WAIT * self.timeout_s
        try:
            early = self._early
            if early is None:
                early = self._next(LEADER, "what became of the step", deadline_s, _ANSWERS)
            kind, body = early
        except errors.TransportError as error:
            raise OutcomeUnknownError(
                f"{error}; whether it committed, HEAD.json in the store says: restart all ranks"
            ) from error
        if not self.is_leader:
            with suppress(PeerLostError):  # it has answered, and may go
                self._send(LEADER, _HEARD, b"")
        return self._body(LEADER, kind, body)

    def _lead(self, decide: Callable[[list[bytes]], bytes], on_failure: Callable[[], None]) -> None:
        kind, present = _ANSWER, set[int]()
        try:
            answer = decide(self._results(present))
        except OutcomeUnknownError as error:
            kind, answer = _UNKNOWN, _told(error)
        except Exception as error:  # noqa: BLE001 - told to every rank, this one too, and raised there
            kind, answer = _FAILED, _told(error)
            try:
                on_failure()
            except BaseException:
                self._answer_all(kind, answer)  # else they would wait, and not know
                raise
        except BaseException as error:
            self._answer_all(_UNKNOWN, _told(error))
            raise
        self._answer_all(kind, answer)
        self._wait_until_heard(present)

    def _wait_until_heard(self, present: set[int]) -> None:
        """Wait for those who will: a leader that ended before would take its answer with it."""
        deadline_s = time.monotonic() + self.timeout_s
        for rank in sorted(present - {self.rank}):
            with suppress(SynclineError):  # the step is over; the next one finds out who is gone
                self._next(rank, "that it heard the answer", deadline_s, (_HEARD,))

    def _answer_all(self, kind: bytes, answer: bytes) -> None:
        for rank in range(self.size):
            with suppress(PeerLostError):  # who is gone needs no answer; the others do
                self._send(rank, kind, answer)

    def _results(self, present: set[int]) -> list[bytes]:
        """Return what every rank's step gave, or raise what it failed with: causes before time-outs.

        Ranks that say either are put into `present`.
        """
        deadline_s = time.monotonic() + _LEADER_WAITS * self.timeout_s
        results: list[bytes] = []
        faults: list[SynclineError] = []
        for rank in range(self.size):
            try:
                kinds = (_RESULT, _NO_RESULT)
                kind, body = self._next(rank, "its result", deadline_s, kinds)
                present.add(rank)
                results.append(self._body(rank, kind, body))
            except SynclineError as error:
                faults.append(error)
        if faults:
            raise min(faults, key=lambda error: isinstance(error, errors.TransportError))
        return results

    def _tell(self, ranks: Collection[int], error: BaseException) -> None:
        messages = [(rank, _FAULT) for rank in sorted(ranks)]
        for rank, kind in [*messages, (LEADER, _NO_RESULT)]:
            with suppress(PeerLostError):  # the error itself is raised here, and reaches the others
                self._send(rank, kind, _told(error))

    def _send(self, to: int, kind: bytes, *body: bytes) -> None:
        if to == self.rank:
            self._own.append((kind, b"".join(body)))
            return
        attempt = self._attempt.to_bytes(_ATTEMPT_BYTES, "little")
        try:
            self._channels[to].send(b"".join((kind, attempt, *body)))
        except PeerLostError as error:
            raise PeerLostError(f"rank {to} is gone: {error}") from error

    def _next(
        self, source: int, what: str, deadline_s: float, kinds: Collection[bytes]
    ) -> tuple[bytes, bytes]:
        """Return kind and body of the next message of these kinds in the present step.

        What a step that failed has left behind is dropped.
        """
        kind = b""
        while kind not in kinds:
            kind, attempt, body = self._message(source, what, deadline_s)
            if attempt > self._attempt:
                raise OutcomeUnknownError(
                    f"rank {source} is at step {attempt}, rank {self.rank} at step {self._attempt}: they "
                    "called publish different numbers of times; restart all ranks"
                )
            if attempt < self._attempt:
                kind = b""
        return kind, body

    def _message(self, source: int, what: str, deadline_s: float) -> tuple[bytes, int, bytes]:
        """Return kind, step and body of a rank's next message."""
        if source == self.rank:
            kind, body = self._own.popleft()
            return kind, self._attempt, body
        try:
            raw = self._channels[source].receive(max(0.0, deadline_s - time.monotonic()))
        except TransportTimeoutError as error:
            raise TransportTimeoutError(
                f"rank {source} did not send {what} to rank {self.rank} in time (timeout_s is "
                f"{self.timeout_s}): it died, is stuck, or needs a longer timeout_s"
            ) from error
        except PeerLostError as error:
            raise PeerLostError(
                f"rank {source} is gone, rank {self.rank} waited for {what}: {error}"
            ) from error
        start = len(_DATA) + _ATTEMPT_BYTES
        attempt = int.from_bytes(raw[len(_DATA) : start], "little")
        return raw[: len(_DATA)], attempt, raw[start:]

    @staticmethod
    def _body(source: int, kind: bytes, body: bytes) -> bytes:
        if kind in (_DATA, _RESULT, _ANSWER):
            return body
        name, _, text = body.decode(errors="replace").partition("\n")
        if not text.startswith("rank "):
            text = f"rank {source}: {text}"
        if kind == _UNKNOWN:
            raise OutcomeUnknownError(text)
        found = getattr(errors, name, None)
        if found is errors.EndpointError:  # cannot be made of a text alone
            found = errors.TransportError
        is_ours = isinstance(found, type) and issubclass(found, SynclineError)
        raise (found if is_ours and found is not None else SynclineError)(text)


def _told(error: BaseException) -> bytes:
    """Return an error as ranks tell it each other: its kind, and what it says."""
    name = type(error).__name__
    text = str(error) if isinstance(error, SynclineError) else f"{name}: {error}"
    return f"{name}\n{text}".encode(errors="replace")
