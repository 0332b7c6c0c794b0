"""Processes that join together find each other through a directory."""

from __future__ import annotations

from functools import partial

import pytest

from hosting import Run, together
from syncline import MemoryEngine
from syncline.errors import ConfigError, TransportTimeoutError
from syncline.hosts import join, meet_in_directory
from syncline.peers import TcpPeer


def test_engines_join_together_through_a_directory(tmp_path):
    run = Run()
    run.publish(1)
    host = run.host("h0")
    engines, names = [MemoryEngine() for _ in range(3)], ["e0", "e1", "e2"]
    peers = [TcpPeer() for _ in engines]

    def one(number):
        meet = meet_in_directory(tmp_path / "board", names[number], names, timeout_s=30)
        offer = host.first.dump()
        return join(
            engines[number],
            [offer],
            [peers[number]],
            timeout_s=60,
            name=names[number],
            exchange=meet,
            bucket_bytes=9000,
        )

    reports = together(*(partial(one, number) for number in range(3)))
    for engine, report in zip(engines, reports, strict=True):
        assert getattr(report, "lost", report) == ()
        run.check(engine, 1)
    for peer in peers:
        peer.close()
    host.close()


def test_who_does_not_come_is_named(tmp_path):
    board = tmp_path / "board"
    meet = meet_in_directory(board, "e0", ["e0", "e1", "e2"], timeout_s=0.2)
    meet_in_directory(board, "e2", ["e2"], timeout_s=1.0)(b"x")
    with pytest.raises(TransportTimeoutError, match="e1 did not come"):
        meet(b"x")
    with pytest.raises(ConfigError, match="used before"):
        meet_in_directory(board, "e0", ["e0"], timeout_s=1.0)(b"x")
    assert (board / "0").stat().st_mode & 0o077 == 0
    for wrong in (["e1"], ["e0", "e0"], [], ["e0", "../e1"]):
        with pytest.raises(ConfigError):
            meet_in_directory(board, "e0", wrong, timeout_s=1.0)
