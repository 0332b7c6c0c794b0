"""One receiver's reads of a version, bucket by bucket: while one bucket is used, the next one is read.

Receivers never talk: each reads the headers of the others to learn what it may take from them, and when they have
taken what it must keep. A host or receiver that is lost, stuck or has moved on is replaced by another that
has the same piece; only a piece that nobody has any more ends it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TypeVar

from syncline import threads
from syncline.abc import Observe
from syncline.errors import (
    MovedOnError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)
from syncline.hosts.offer import Way
from syncline.hosts.roads import Roads
from syncline.hosts.sizing import Buckets
from syncline.hosts.sources import Sources
from syncline.layouts import Block
from syncline.layouts.blocks import row_major, run_of
from syncline.peers.generation import HEADER_BYTES, Header
from syncline.peers.streams import Deadline
from syncline.plan import Assignment, Fetch, Piece, Plan
from syncline.sync.phases import Phases, waiting
from syncline.types import Bits, Read, Step, unsigned

STEPS = ("take.bucket_read",)

_SENDERS_AT_ONCE = 8

T = TypeVar("T")
Bucket = list[tuple[Piece, Bits]]


@dataclass(frozen=True, slots=True)
class Fellow:
    """Another receiver as those see it that read from it.

    Attributes:
        prefix: how the names of its regions begin.
        ways: descriptions of its memory, once its room is registered.
    """

    name: str
    machine: str
    prefix: str
    ways: tuple[Way, ...]


class Taker:
    """Reads what one receiver is to get.

    Args:
        me: this receiver's number in the assignment.
        roads: its transports; `staged`: how many buckets it keeps, and how large.
        deadline: by which all has to be read; patience_s: how long one sender may keep it waiting while
            another has the same.
    """

    def __init__(
        self,
        sources: Sources,
        plan: Plan,
        assignment: Assignment,
        me: int,
        roads: Roads,
        staged: Buckets,
        deadline: Deadline,
        *,
        patience_s: float,
        observe: Observe,
        phases: Phases,
    ) -> None:
        self._phases = phases
        self._sources = sources
        self._plan = plan
        self._assignment = assignment
        self._me = me
        self._roads = roads
        self._staged = staged
        self._deadline = deadline
        self._patience_s = patience_s
        self._observe = observe
        self._slots = [roads.room(f"slot{n}", staged.nbytes) for n in range(staged.count)]
        self._header = Header(roads.room("header", HEADER_BYTES))
        self._header.settle()
        self._fellows: Sequence[Fellow] = ()
        self._done_bytes = 0
        self.lost: dict[str, str] = dict(sources.lost)

    def meet(self, fellows: Sequence[Fellow]) -> None:
        """Learn of all receivers, this one included, by number; before `buckets`."""
        self._fellows = fellows

    def buckets(self) -> Generator[Bucket, None, None]:
        """Yield every bucket: its pieces, and their bits, valid until the next bucket is asked for.

        Raises:
            TransportError: nobody has a piece any more; names who was lost, and how.
            TransportTimeoutError: the deadline has passed.
        """
        jobs = (partial(self._fill, number) for number in range(len(self._plan.buckets)))
        if self._staged.count == 1:
            return waiting((job() for job in jobs), self._phases)
        return waiting(threads.ahead(jobs), self._phases)

    def linger(self) -> None:
        """Wait until nobody needs a bucket of this side any more; who is gone by then needs none."""
        count, lost = len(self._plan.buckets), dict(self.lost)
        for number in range(max(0, count - self._staged.count), count):
            self._await_drained(number)
        self.lost = lost

    def _fill(self, number: int) -> Bucket:
        if number >= self._staged.count:
            with self._phases("wait"):
                self._await_drained(number - self._staged.count)
        with self._phases("wire"):
            return self._read(number)

    def _read(self, number: int) -> Bucket:
        slot = number % self._staged.count
        bucket = [transfer.piece for transfer in self._plan.buckets[number]]
        mine = [f for f in self._assignment.buckets[number] if f.target == self._me]
        offsets = _offsets(bucket, mine)
        self._header.tag(slot, None)
        into = f"{self._roads.prefix}.slot{slot}"
        self._from_hosts([f for f in mine if not f.is_relay], bucket, into, offsets)
        self._header.tag(slot, number)
        self._from_fellows([f for f in mine if f.is_relay], number, into, offsets)
        self._header.drain(number + 1)
        place = self._slots[slot]
        found = []
        for index, offset in offsets.items():
            piece = bucket[index]
            raw = place[offset : offset + piece.nbytes]
            found.append((piece, raw.view(unsigned(self._width(piece)))))
            self._done_bytes += piece.nbytes
        self._observe(Step("take.bucket_read", self._done_bytes))
        return found

    def _width(self, piece: Piece) -> int:
        return self._sources.held.manifest.by_name[piece.name].meta.unit_bytes

    def _from_hosts(
        self,
        fetches: Sequence[Fetch],
        bucket: Sequence[Piece],
        into: str,
        offsets: Mapping[int, int],
    ) -> None:
        """Read pieces from hosts, several at once; what one cannot give, another one is asked for."""
        waiting = [(f.piece, f.sender, f.nic) for f in fetches if bucket[f.piece].nbytes]
        while waiting:
            by_sender: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
            for index, sender, nic in waiting:
                by_sender[self._alive(bucket[index], sender), nic].append(index)
            read = partial(self._from_host, bucket=bucket, into=into, offsets=offsets)
            failed = _each(read, list(by_sender.items()))
            waiting = [(index, sender, nic) for (sender, nic), all_ in failed for index in all_]

    def _alive(self, piece: Piece, wanted: int) -> int:
        """Return the host to read a piece from: the assigned one, or another if that one is lost."""
        hosts = self._sources.hosts
        for number in (wanted, *piece.sources):
            if hosts[number].offer.host not in self.lost:
                return number
        reasons = "; ".join(
            f"{hosts[n].offer.host}: {self.lost[hosts[n].offer.host]}" for n in piece.sources
        )
        kind = TransportTimeoutError if "did not answer" in reasons else PeerLostError
        raise kind(f"{piece.name}: nobody is left who has it; {reasons}", tensor=piece.name)

    def _from_host(
        self,
        item: tuple[tuple[int, int], list[int]],
        *,
        bucket: Sequence[Piece],
        into: str,
        offsets: Mapping[int, int],
    ) -> bool:
        """Read pieces from one host; say whether it gave them, and note it as lost if not."""
        (sender, nic), indices = item
        offer, catalog = self._sources.hosts[sender].offer, self._sources.hosts[sender].catalog
        reads = []
        for index in indices:
            piece = bucket[index]
            stored = catalog.tensors[piece.name]
            place = offsets[index]
            for offset, nbytes in stretches(piece, self._width(piece)):
                reads.append(Read(stored.region, stored.offset + offset, into, place, nbytes))
                place += nbytes
        others = any(set(bucket[index].sources) - {sender} for index in indices)
        try:
            checked, described = self._roads.to(offer.ways, offer.machine, nic)
            checked.read(described, offer.header, offer.generation, reads, self._left_s(others))
        except TransportError as error:
            self._deadline_is_met(f"host {offer.host}", error)
            self.lost[offer.host] = str(error)
            return False
        return True

    def _from_fellows(
        self, fetches: Sequence[Fetch], number: int, into: str, offsets: Mapping[int, int]
    ) -> None:
        """Read pieces that other receivers have by now; what they cannot give, hosts are asked for."""
        bucket = [transfer.piece for transfer in self._plan.buckets[number]]
        by_sender: defaultdict[int, list[Fetch]] = defaultdict(list)
        for fetch in fetches:
            by_sender[fetch.sender].append(fetch)
        for sender, wanted in by_sender.items():
            fellow = self._fellows[sender]
            if fellow.name in self.lost or not self._from_fellow(
                sender, wanted, number, into, offsets
            ):
                hosts = [
                    Fetch(
                        self._me, f.piece, is_relay=False, sender=bucket[f.piece].sources[0], nic=0
                    )
                    for f in wanted
                ]
                self._from_hosts(hosts, bucket, into, offsets)

    def _from_fellow(
        self,
        sender: int,
        wanted: Sequence[Fetch],
        number: int,
        into: str,
        offsets: Mapping[int, int],
    ) -> bool:
        fellow = self._fellows[sender]
        slot = number % self._staged.count
        bucket = [transfer.piece for transfer in self._plan.buckets[number]]
        theirs = _offsets(
            bucket, [f for f in self._assignment.buckets[number] if f.target == sender]
        )
        region = f"{fellow.prefix}.slot{slot}"
        reads = [
            Read(region, theirs[f.piece], into, offsets[f.piece], bucket[f.piece].nbytes)
            for f in wanted
        ]
        header = f"{fellow.prefix}.header"
        try:
            checked, described = self._roads.to(fellow.ways, fellow.machine, wanted[0].nic)
            left_s = self._left_s(others=True)
            there = checked.wait(described, header, lambda s: s.tags[slot] > number, left_s)
            if there.tags[slot] == number + 1:
                checked.take(described, reads, self._left_s(others=True))
                there = checked.state(described, header, self._left_s(others=True))
        except MovedOnError:
            return False
        except TransportError as error:
            self._deadline_is_met(f"receiver {fellow.name}", error)
            self.lost[fellow.name] = str(error)
            return False
        return there.tags[slot] == number + 1  # else it went on to its next bucket

    def _await_drained(self, number: int) -> None:
        """Wait for those who take pieces of a bucket from this side, as long as patience lasts.

        Who is too late finds the bucket's tag gone and asks a host.
        """
        takers = {
            f.target
            for f in self._assignment.buckets[number]
            if f.is_relay and f.sender == self._me
        }
        for taker in sorted(takers):
            fellow = self._fellows[taker]
            if fellow.name in self.lost:
                continue
            try:
                checked, described = self._roads.to(fellow.ways, fellow.machine)
                header = f"{fellow.prefix}.header"
                checked.wait(
                    described, header, lambda s: s.drained > number, self._left_s(others=True)
                )
            except MovedOnError:
                continue  # it took its room back, so it needs nothing
            except TransportError as error:
                self.lost[fellow.name] = str(error)

    def _left_s(self, others: bool) -> float:
        """Return how long to wait for one sender."""
        try:
            left_s = self._deadline.left_s()
        except TimeoutError as error:
            raise TransportTimeoutError(
                f"the version was not there after {self._deadline.timeout_s} s; lost: {self.lost}"
            ) from error
        return min(left_s, self._patience_s) if others else left_s

    def _deadline_is_met(self, who: str, error: TransportError) -> None:
        """Raise if a sender failed because there is no time left."""
        try:
            self._deadline.left_s()
        except TimeoutError:
            raise TransportTimeoutError(
                f"{who}: {error}; nothing is left of {self._deadline.timeout_s} s"
            ) from error


def stretches(piece: Piece, width: int) -> Iterator[tuple[int, int]]:
    """Yield (first byte, bytes) in the flat canonical tensor of a piece's contiguous parts, in order.

    Example:
        >>> list(stretches(Piece("w", (0, 1), (2, 2), (4, 4), 8, (0,), (0,)), 2))
        [(2, 4), (10, 4)]
    """
    strides = row_major(piece.grid)
    block = Block(piece.name, piece.start, piece.shape, "", 0, strides)
    if not block.count:
        return
    run = run_of(block, piece.grid)
    counts, steps, inner = run.counts, run.canonical_strides, 1
    if steps and steps[-1] == 1:
        counts, steps, inner = counts[:-1], steps[:-1], counts[-1]
    for index in product(*(range(count) for count in counts)):
        first = run.canonical + sum(i * step for i, step in zip(index, steps, strict=True))
        yield first * width, inner * width


def _offsets(bucket: Sequence[Piece], fetches: Sequence[Fetch]) -> dict[int, int]:
    """Return where a receiver puts the pieces that it gets of a bucket, by index, in the bucket's order."""
    offsets, place = {}, 0
    for index in sorted(fetch.piece for fetch in fetches):
        offsets[index] = place
        place += bucket[index].nbytes
    return offsets


def _each(call: Callable[[T], bool], items: Sequence[T]) -> list[T]:
    """Call with every item, several at once; return those for which it said False."""
    if len(items) == 1:
        return [] if call(items[0]) else list(items)
    with ThreadPoolExecutor(min(_SENDERS_AT_ONCE, len(items))) as pool:
        done = list(pool.map(call, items))
    return [item for item, was_good in zip(items, done, strict=True) if not was_good]
