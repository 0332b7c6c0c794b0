"""The ranks of a trainer that send one version, as an engine sees them: one inlet each, in a planned order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from syncline.abc import Inlet
from syncline.errors import FormatError, PeerLostError, TransportError, TransportTimeoutError
from syncline.format import strict_json
from syncline.types import Bits, DeviceBits

if TYPE_CHECKING:
    from collections.abc import Iterator


class Lanes:
    """The buckets of a version from all ranks that send some of it.

    Args:
        inlet: to the rank that leads.
        addresses: of the further ranks.
        sources: by which lane each bucket comes: 0 for the leader, else the place in `addresses`, from 1.
        join_s: how long it may take to join all of them.

    Raises:
        FormatError: a bucket is said to come from a rank that is not there.
        PeerLostError, TransportTimeoutError: a rank cannot be joined; names it.
    """

    def __init__(
        self, inlet: Inlet, addresses: Sequence[str], sources: Sequence[int], join_s: float
    ) -> None:
        deadline_s = time.monotonic() + join_s
        self._sources = sources
        self._is_alone = not addresses
        self._inlets: dict[int, Inlet] = {}
        for source in sorted(set(sources)):
            if not 0 <= source <= len(addresses):
                raise FormatError(
                    f"a load: sources must be at most {len(addresses)}, found {source}"
                )
            with self._naming(source):
                self._inlets[source] = inlet if source == 0 else inlet.lane(addresses[source - 1])
                if source:
                    _join(self._inlets[source], deadline_s)

    def buckets(self, sizes: Sequence[int]) -> Generator[Bits | DeviceBits, None, None]:
        """Take part in the rounds of all ranks; as `Inlet.buckets`, but opened with the first bucket.

        What came by a lane stays until the next bucket of that lane, or after its last one any, is asked for.
        Errors name the rank.
        """
        is_whole = False
        try:
            yield from self._together(sizes)
            is_whole = True
        finally:
            if not is_whole:
                self._leave()

    def _together(self, sizes: Sequence[int]) -> Generator[Bits | DeviceBits, None, None]:
        with ExitStack() as stack:
            coming = {}
            for source, inlet in self._inlets.items():
                its = [size for size, at in zip(sizes, self._sources, strict=True) if at == source]
                with self._naming(source):
                    coming[source] = stack.enter_context(closing(inlet.buckets(its)))
            left = Counter(self._sources)
            last: int | None = None
            for source in self._sources:
                if last is not None and not left[last]:
                    self._end(last, coming[last])  # its rank waits for nothing that others send
                with self._naming(source):
                    there = next(coming[source])
                left[source] -= 1
                last = source
                yield there
            if last is not None:
                self._end(last, coming[last])

    def _end(self, source: int, buckets: Generator[Bits | DeviceBits, None, None]) -> None:
        """Release the last bucket of a lane."""
        with self._naming(source):
            next(buckets, None)

    def _leave(self) -> None:
        """Leave all ranks but the leader, who may not know yet that the round is over; the next round joins again."""
        for source, inlet in self._inlets.items():
            if source:
                inlet.close()

    @contextmanager
    def _naming(self, source: int) -> Iterator[None]:
        try:
            yield
        except (PeerLostError, TransportTimeoutError) as error:
            if self._is_alone:
                raise
            raise type(error)(f"trainer rank {source}: {error}") from error
        except TransportError as error:
            raise PeerLostError(f"trainer rank {source}: {error}") from error


def _join(lane: Inlet, deadline_s: float) -> None:
    """Join a rank by then, however long everything else may take."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TransportTimeoutError("no time was left to join it; the ranks before took it all")
    whole_s, lane.timeout_s = lane.timeout_s, min(lane.timeout_s, left_s)
    try:
        lane.channel()
    finally:
        lane.timeout_s = whole_s


def lanes_of(fields: strict_json.Fields, inlet: Inlet, count: int) -> Lanes:
    """Return what a load says of who sends its `count` buckets."""
    addresses = [str(address) for address in fields.items("lanes")]
    rows = fields.items("sources")
    join_s = fields.integer("join_ms", minimum=1) / 1000
    if not addresses and not rows:
        return Lanes(inlet, (), [0] * count, join_s)
    if len(rows) != count:
        raise FormatError(
            f"a load: sources must be {count}, one for each bucket, found {len(rows)}"
        )
    sources = [strict_json.integer(row, "a load: sources") for row in rows]
    return Lanes(inlet, addresses, sources, join_s)
