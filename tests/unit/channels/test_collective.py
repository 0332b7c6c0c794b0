"""What a collective path does beside what every live path promises."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from syncline.channels import CollectiveInlet, CollectiveOutlet, groups
from syncline.channels.lobby import Lobby
from syncline.channels.rounds import hear_opened
from syncline.channels.sockets import SocketChannel
from syncline.errors import PeerLostError, TransportUnavailableError
from syncline.sync.live import messages

WAIT_S = 20.0


def test_an_engine_without_torch_says_so_where_it_joins(monkeypatch) -> None:
    """In a round it would keep all others from committing."""
    lobby = Lobby("127.0.0.1:0", CollectiveInlet.name, 5.0)
    monkeypatch.setattr(groups, "find_spec", lambda name: None)
    inlet = CollectiveInlet(lobby.address, name="a", timeout_s=5.0)
    try:
        with pytest.raises(TransportUnavailableError, match="pip install"):
            inlet.channel()
        assert lobby.members() == {}
    finally:
        inlet.close()
        lobby.close()


def test_an_engine_that_votes_instead_of_opening_is_told_by_its_words_and_its_vote_stays() -> None:
    """The trainer took the vote for its own, and then waited in vain for one."""
    trainer, engine = SocketChannel.pair()
    with closing(trainer), closing(engine):
        messages.send(engine, messages.VOTE, 7, {"error": "it has no room", "is_own": True})
        with pytest.raises(
            PeerLostError, match="engine 'a' did not open the round: it has no room$"
        ):
            hear_opened("a", trainer, 1, WAIT_S)
        vote = messages.receive(trainer, (messages.VOTE,), 7, WAIT_S)
        assert vote.fields.text("error") == "it has no room"


def test_a_round_that_was_left_keeps_its_memory_from_the_next() -> None:
    """What is under way in a group that was left may still write to it."""
    pytest.importorskip("torch")
    with (
        closing(CollectiveOutlet("127.0.0.1:0")) as outlet,
        closing(CollectiveInlet(outlet.address, name="a", timeout_s=WAIT_S)) as inlet,
        ThreadPoolExecutor() as pool,
    ):
        inlet.channel()
        outlet.wait(1, WAIT_S)

        def send() -> None:
            with outlet.round(["a"], [64] * 2, WAIT_S) as give:
                for number in range(2):
                    give([(0, np.full(64, number, np.uint8))])

        sending = pool.submit(send)
        with closing(inlet.buckets([64] * 2)) as buckets:
            old = next(buckets)
        sending.exception(WAIT_S)
        outlet.reset()
        sending = pool.submit(send)
        for new in inlet.buckets([64] * 2):
            assert not np.shares_memory(old, new)
        sending.result(WAIT_S)
