"""Whatever the plan: every receiver gets each of its pieces once, from somebody who has it by then."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError
from syncline.plan import Node, Piece, Plan, Transfer, assign, receivers

MB = 1 << 20


@st.composite
def cases(draw) -> tuple[Plan, list[Node], list[Node], bool]:
    hosts = draw(st.integers(1, 4))
    engines, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    buckets = []
    for number in range(draw(st.integers(1, 4))):
        bucket = []
        for index in range(draw(st.integers(1, 12))):
            sources = draw(st.sets(st.integers(0, hosts - 1), min_size=1))
            targets = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
            size = draw(st.sampled_from([1, 1000, MB]))
            piece = Piece(
                f"t{number}.{index}", (0,), (size,), (size,), size, tuple(sources), tuple(targets)
            )
            bucket.append(Transfer(piece, ()))
        buckets.append(tuple(bucket))
    nics = st.integers(1, 3).map(lambda n: tuple(f"nic{i}" for i in range(n)))
    where = st.sampled_from(["", "m0", "m1"])

    def nodes(kind, count):
        return [Node(f"{kind}{n}", draw(where), draw(nics)) for n in range(count)]

    plan = Plan(engines, hosts, ranks, MB * 20, tuple(buckets), "d")
    return plan, nodes("h", hosts), nodes("e", engines * ranks), draw(st.booleans())


@given(cases())
def test_everyone_gets_everything_once_from_who_has_it(case):
    plan, hosts, targets, relays = case
    assignment = assign(plan, hosts, targets, relays=relays)
    assert assignment == assign(plan, hosts, targets, relays=relays)
    for bucket, fetches in zip(plan.buckets, assignment.buckets, strict=True):
        pieces = [transfer.piece for transfer in bucket]
        wanted = Counter((t, i) for i, piece in enumerate(pieces) for t in receivers(plan, piece))
        assert Counter((f.target, f.piece) for f in fetches) == wanted
        direct = {(f.target, f.piece) for f in fetches if not f.is_relay}
        for f in fetches:
            if f.is_relay:
                assert relays and f.sender != f.target
                assert (f.sender, f.piece) in direct, "passed on before it was there"
                assert f.nic < len(targets[f.sender].nics)
            else:
                assert f.sender in pieces[f.piece].sources
                assert f.nic < len(hosts[f.sender].nics)
        assert [f.is_relay for f in fetches] == sorted(f.is_relay for f in fetches)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(8, 40))
def test_hosts_send_the_model_once_and_receivers_no_more_than_they_get(hosts, count, pieces):
    """Far apart, every piece on every host, equal pieces: nobody sends much more than a fair part."""
    bucket = tuple(
        Transfer(Piece(f"t{i}", (0,), (MB,), (MB,), MB, tuple(range(hosts)), (0,)), ())
        for i in range(pieces)
    )
    plan = Plan(count, hosts, 1, MB * pieces, (bucket,), "d")
    nodes = [Node(f"h{n}") for n in range(hosts)]
    fetches = assign(plan, nodes, [Node(f"e{n}") for n in range(count)]).buckets[0]
    sent = Counter((f.is_relay, f.sender) for f in fetches)
    assert sum(n for (is_relay, _), n in sent.items() if not is_relay) >= pieces
    fair = -(-pieces * count // (hosts + count))
    assert max(sent.values()) <= max(2 * fair, -(-pieces // hosts)) + 2
    most = -(-pieces // count) * (count - 1)
    assert all(n <= most for (is_relay, _), n in sent.items() if is_relay)


@given(st.integers(2, 4))
def test_nics_of_one_host_share_the_load(nics):
    bucket = tuple(
        Transfer(Piece(f"t{i}", (0,), (MB,), (MB,), MB, (0,), (0,)), ()) for i in range(4 * nics)
    )
    plan = Plan(1, 1, 1, MB * 99, (bucket,), "d")
    host = Node("h", "", tuple(f"nic{n}" for n in range(nics)))
    fetches = assign(plan, [host], [Node("e")]).buckets[0]
    assert set(Counter(f.nic for f in fetches).values()) == {4}


def test_shared_memory_goes_before_any_nic():
    piece = Piece("t", (0,), (8,), (8,), 8, (0, 1), (0,))
    plan = Plan(1, 2, 1, 99, ((Transfer(piece, ()),) * 6,), "d")
    hosts = [Node("far", "m0"), Node("near", "m1")]
    fetches = assign(plan, hosts, [Node("e", "m1")]).buckets[0]
    assert {f.sender for f in fetches} == {1}


@given(cases())
def test_the_digest_says_every_difference(case):
    plan, hosts, targets, relays = case
    one = assign(plan, hosts, targets, relays=relays)
    assert one.digest != assign(replace(plan, digest="other"), hosts, targets).digest
    with pytest.raises(ConfigError):
        assign(plan, [*hosts, Node("more")], targets)
    with pytest.raises(ConfigError):
        assign(plan, [replace(hosts[0], nics=()), *hosts[1:]], targets)
