"""Engines that join come by the way that is chosen, and hold the same bits by either."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hosting import Run
from syncline import MemoryEngine
from syncline.abc import Buffer
from syncline.choice import Link, Links
from syncline.errors import ConfigError
from syncline.hosts import VersionHost, enter
from syncline.peers import TcpPeer


@pytest.fixture
def run() -> Run:
    run = Run()
    run.publish(1)
    run.publish(2)
    return run


def test_peers_are_asked_where_somebody_holds_the_version(run: Run, monkeypatch) -> None:
    def refuse(key: str, chunks: Iterable[Buffer]) -> None:
        raise AssertionError(f"{key} was written")

    monkeypatch.setattr(run.store, "put", refuse)
    with TcpPeerHost(run) as offer:
        engine, peer = MemoryEngine(), TcpPeer()
        report = enter(engine, run.store, [offer], [peer], timeout_s=30)
        assert (report.decision.transport, report.moved.transport) == ("peers", "peers")
        run.check(engine, 2)
        assert report.version == 2
        peer.close()


def test_the_store_is_asked_where_nobody_does(run: Run) -> None:
    engine = MemoryEngine()
    report = enter(engine, run.store, [], [], timeout_s=30)
    assert (report.decision.transport, report.moved.transport) == ("store", "store")
    run.check(engine, 2)


def test_a_far_quicker_store_wins(run: Run) -> None:
    links = Links(store=Link.of(1e9), fabric=Link.of(1e4))
    with TcpPeerHost(run) as offer:
        engine = MemoryEngine()
        report = enter(engine, run.store, [offer], [], timeout_s=30, links=links)
        assert report.decision.transport == "store"
        run.check(engine, 2)


def test_without_an_offer_or_a_store_there_is_no_way() -> None:
    with pytest.raises(ConfigError, match="nobody who holds the version offers it"):
        enter(MemoryEngine(), None, [], [], timeout_s=1)


class TcpPeerHost:
    """A host that offers the run's newest version."""

    def __init__(self, run: Run) -> None:
        self._peer = TcpPeer()
        self._host = VersionHost("host-0", [self._peer])
        self._offer = self._host.register(run.engine()).dump()

    def __enter__(self) -> bytes:
        return self._offer

    def __exit__(self, *_: object) -> None:
        self._host.close()
        self._peer.close()
