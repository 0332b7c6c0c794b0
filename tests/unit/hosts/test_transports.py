"""Joining, alone and together, over every transport there is; those not installed say so."""

from __future__ import annotations

from functools import partial

import pytest

from hosting import Run, exchange_of, together
from syncline import MemoryEngine
from syncline.errors import TransportError, TransportUnavailableError
from syncline.hosts import VersionHost, join
from syncline.peers import SharedPeer, open_peer


@pytest.fixture(params=["mooncake", "nixl", "shared", "tcp"])
def make(request):
    made = []

    def one():
        try:
            made.append(SharedPeer() if request.param == "shared" else open_peer(request.param))
        except TransportUnavailableError as error:
            pytest.skip(str(error))
        return made[-1]

    yield one
    for peer in made:
        peer.close()


@pytest.fixture
def run() -> Run:
    run = Run()
    run.publish(1)
    run.publish(2)
    return run


def test_alone_and_after_the_host_moved_on(run, make):
    host = VersionHost("h0", [make()])
    old = host.register(run.engine(1))
    engine, peer = MemoryEngine(), make()
    join(engine, [old.dump()], [peer], timeout_s=60, bucket_bytes=20000)
    run.check(engine, 1)
    host.unregister(old.sha256)
    new = host.register(run.engine(2))
    with pytest.raises(TransportError, match="h0"):
        join(engine, [old.dump()], [peer], timeout_s=60)
    run.check(engine, 1)
    join(engine, [new.dump()], [peer], timeout_s=60, bucket_bytes=20000)
    run.check(engine, 2)
    host.close()


def test_together(run, make):
    host = VersionHost("h0", [make()])
    offer = host.register(run.engine(2)).dump()
    engines, peers, exchanges = [MemoryEngine() for _ in "ab"], [make(), make()], exchange_of(2)
    reports = together(
        *(
            partial(
                join,
                engines[n],
                [offer],
                [peers[n]],
                timeout_s=60,
                name=f"e{n}",
                exchange=exchanges[n],
                bucket_bytes=30000,
            )
            for n in range(2)
        )
    )
    for engine, report in zip(engines, reports, strict=True):
        assert getattr(report, "lost", report) == ()
        run.check(engine, 2)
    host.close()
