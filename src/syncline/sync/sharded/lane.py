"""One trainer rank's lane to the engines: it gathers the buckets of the tensors that it owns, and sends them.

All ranks go through the buckets of a version in one planned order. Of each, the owner of its tensors takes what
other ranks answer for, puts it together and sends it to all engines, over an outlet of its own; the others send
the owner their pieces, two buckets ahead. So a rank has at most two buckets of its own and its pieces of two more
under way, and nobody receives what it does not need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from typing import NamedTuple

from syncline.abc import Outlet, Send
from syncline.errors import FormatError, PeerLostError, SynclineError
from syncline.format import bucket
from syncline.format.bucket import Bucket, Cargo
from syncline.sync.live.goods import Sent, payload_bits, pieces_of
from syncline.sync.sharded.gathering import Gathering, Told
from syncline.sync.sharded.ranks import Ranks
from syncline.types import Bits, DeviceBits, TensorMeta

ORDER, PIECES, HAVE, ENDED = b"O", b"P", b"C", b"M"
"""What ranks say in a delivery: what to do, parts of a bucket, that it has them, how a round ended."""

_NUMBER_BYTES = 8
_AHEAD = 2


class Mail:
    """Messages of one delivery after the other between ranks; those of a round that is over are dropped."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._waiting: dict[int, list[_Letter]] = {}

    def send(self, to: int, kind: bytes, number: int, *body: bytes) -> None:
        """Hand a message to a rank; raises as `Ranks.send`.

        Args:
            number: of the round that it belongs to.
        """
        self._ranks.send(to, kind, number.to_bytes(_NUMBER_BYTES, "little"), *body)

    def hear(
        self, source: int, kind: bytes, number: int, what: str, *, deadline_s: float | None = None
    ) -> tuple[int, memoryview]:
        """Return number and body of a rank's next message of this kind; what it says else is kept.

        Args:
            number: of the round; of an order: the lowest that it may have.
            deadline_s: as `Ranks.receive`.

        Raises:
            PeerLostError: it says instead that its round has ended; as `Ranks.receive`.
        """
        waiting = [each for each in self._waiting.get(source, []) if each.number >= number]
        self._waiting[source] = waiting
        place = 0
        while True:
            if place == len(waiting):
                raw = memoryview(self._ranks.receive(source, what, deadline_s=deadline_s))
                stop = 1 + _NUMBER_BYTES
                number_of = int.from_bytes(raw[1:stop], "little")
                waiting.append(_Letter(bytes(raw[:1]), number_of, raw[stop:]))
            letter = waiting[place]
            if letter.number < number:
                del waiting[place]
            elif letter.kind == kind:
                del waiting[place]
                return letter.number, letter.body
            elif kind != ORDER and letter.kind in (ORDER, ENDED):
                is_told = letter.kind == ENDED
                why = bytes(letter.body).decode(errors="replace") if is_told else "called off"
                raise PeerLostError(f"rank {source} has ended the round: {why}")
            else:
                place += 1


class _Letter(NamedTuple):
    kind: bytes
    number: int
    body: memoryview


class Lane:
    """One rank's part in rounds on live paths.

    Args:
        owners: by tensor, the rank that sends it.
        dense: returns a tensor's bits if this rank holds it whole, else None.

    Attributes:
        payloads: gives what this rank encoded of a delta, by tensor.
    """

    def __init__(
        self,
        owners: Mapping[str, int],
        ranks: Ranks,
        outlet: Outlet,
        gathering: Gathering,
        dense: Callable[[str], Bits | None],
    ) -> None:
        self._owners = owners
        self._ranks = ranks
        self._outlet = outlet
        self._gathering = gathering
        self._dense = dense
        self._number = 0
        self._unconfirmed: deque[int] = deque()
        self.mail = Mail(ranks)
        self.payloads: Callable[[], Mapping[str, memoryview]] = dict

    def run(
        self,
        number: int,
        cargo: Cargo,
        members: Sequence[str],
        timeout_s: float,
        on_opened: Callable[[], None],
        on_sent: Sent,
    ) -> None:
        """Take part in sending all buckets to these members.

        Args:
            number: of the round, the same on all ranks, and higher than that of any before.

        Raises:
            TransportError: a member or a rank is gone, or late; names it.

        Collective: yes, over the ranks. Memory: the buckets under way.
        """
        sent = [each for each in cargo.buckets if each.nbytes]
        sizes = [each.nbytes for each in sent if self.is_mine(each)]
        self._number, self._unconfirmed = number, deque()
        with ExitStack() as stack:
            give: Send | None = None
            if sizes:
                give = stack.enter_context(self._outlet.round(members, sizes, timeout_s))
            on_opened()
            coming = iter(sent if cargo.kind == "full" else ())
            self._pass_on(islice(coming, _AHEAD))
            for each in sent:
                self._pass_on(islice(coming, 1))
                if give is not None and self.is_mine(each):
                    give(self._payloads(each) if cargo.kind == "delta" else self._gathered(each))
                on_sent(each)
            self._confirm(0)

    def is_mine(self, each: Bucket) -> bool:
        """Whether this rank sends a bucket."""
        return self._source(each) == self._ranks.rank

    def tell(self, number: int, why: str) -> None:
        """Tell every rank that a round has ended here with an error, so that nobody waits for this one."""
        for rank in range(self._ranks.size):
            if rank != self._ranks.rank:
                with suppress(PeerLostError):  # who is gone waits for nobody
                    self.mail.send(rank, ENDED, number, why.encode(errors="replace") or b"?")

    def leave(self, members: Sequence[str]) -> None:
        """End the round of engines that may wait for this rank to begin it; they join again."""
        here = self._outlet.members()
        for name in members:
            if name in here:
                with suppress(SynclineError):
                    here[name].close()

    def _source(self, each: Bucket) -> int:
        return self._owners[each.pieces[0].meta.name]

    def _pass_on(self, buckets: Iterable[Bucket]) -> None:
        """Send owners what this rank answers for, as soon as what was sent long before is there.

        As many may be unconfirmed as are sent ahead: so what is waited for was always due before the bucket
        that this rank is to send next, and nobody can wait in a circle.
        """
        for each in buckets:
            if self.is_mine(each):
                continue
            pieces = [
                raw
                for meta, start, count in _spans(each)
                for raw in self._gathering.pieces(meta, start, count)
            ]
            if pieces:
                self._confirm(_AHEAD - 1)
                self._unconfirmed.append(self._source(each))
                self.mail.send(self._source(each), PIECES, self._number, *pieces)

    def _confirm(self, most: int) -> None:
        """Wait until all but so many messages with pieces have arrived."""
        while len(self._unconfirmed) > most:
            self.mail.hear(
                self._unconfirmed.popleft(), HAVE, self._number, "that it has its pieces"
            )

    def _payloads(self, each: Bucket) -> list[tuple[int, Bits | DeviceBits]]:
        return list(pieces_of(each, payload_bits(self.payloads())))

    def _gathered(self, each: Bucket) -> list[tuple[int, Bits | DeviceBits]]:
        """Return what goes into a bucket of this rank's, out of all ranks' pieces."""
        told: dict[int, Told] = {}

        def take(rank: int, nbytes: int) -> memoryview:
            taken = told[rank].take(nbytes)
            if taken.nbytes != nbytes:
                raise FormatError(
                    f"rank {rank} sent too few bytes of a bucket: the ranks do not have one layout"
                )
            return taken

        for rank in sorted({rank for span in _spans(each) for rank in self._senders(*span)}):
            told[rank] = Told(self._told(rank, each))
        pieces: list[tuple[int, Bits | DeviceBits]] = []
        for piece, (meta, start, count) in zip(each.pieces, _spans(each), strict=True):
            whole = self._dense(meta.name)
            bits = (
                self._gathering.span(meta, start, count, take)
                if whole is None
                else whole[start : start + count]
            )
            pieces.append((piece.offset, bits))
        for rank, rest in told.items():
            if rest.left_bytes:
                raise FormatError(
                    f"rank {rank} sent {rest.left_bytes} bytes of a bucket too many: the ranks do not have one "
                    "layout"
                )
        return pieces

    def _senders(self, meta: TensorMeta, start: int, count: int) -> Iterator[int]:
        if self._dense(meta.name) is None:
            yield from self._gathering.senders(meta, start, count)

    def _told(self, rank: int, each: Bucket) -> bytes | memoryview:
        if rank == self._ranks.rank:
            return b"".join(
                raw
                for meta, start, count in _spans(each)
                if self._dense(meta.name) is None
                for raw in self._gathering.pieces(meta, start, count)
            )
        _, body = self.mail.hear(rank, PIECES, self._number, "its pieces of a bucket")
        self.mail.send(rank, HAVE, self._number)
        return body


def planned(
    metas: Sequence[TensorMeta], owners: Mapping[str, int], bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Return buckets of one owner each, in such an order that all ranks have sent about as much at any time.

    Example:
        >>> metas = [TensorMeta(name, "U8", (256,)) for name in "abc"]
        >>> found = planned(metas, {"a": 0, "b": 0, "c": 1}, 256)
        >>> [each.pieces[0].meta.name for each in found]
        ['a', 'c', 'b']
    """
    runs: dict[int, deque[list[Bucket]]] = {}
    for owner in sorted({owners[meta.name] for meta in metas}):
        its = [meta for meta in metas if owners[meta.name] == owner]
        runs[owner] = deque(_runs(bucket.pack(its, bucket_bytes)))
    sent_bytes = dict.fromkeys(runs, 0)
    order: list[Bucket] = []
    while runs:
        owner = min(runs, key=lambda rank: (sent_bytes[rank], rank))
        run = runs[owner].popleft()
        order += run
        sent_bytes[owner] += sum(each.nbytes for each in run)
        if not runs[owner]:
            del runs[owner]
    return tuple(order)


def _runs(buckets: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Yield buckets that must follow each other, since a tensor goes on from one to the next."""
    run: list[Bucket] = []
    for each in buckets:
        run.append(each)
        if each.pieces[-1].is_last:
            yield run
            run = []


def _spans(each: Bucket) -> Iterator[tuple[TensorMeta, int, int]]:
    """Yield tensor, first unit and number of units of every piece."""
    for piece in each.pieces:
        yield piece.meta, piece.units.start, piece.units.stop - piece.units.start
