"""What every channel promises, over every channel there is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from syncline.abc import Channel
from syncline.channels import MemoryChannel, SocketChannel
from syncline.errors import ConfigError, PeerLostError, TransportTimeoutError

Pair = tuple[Channel, Channel]

MAKERS: dict[str, Callable[[], Pair]] = {"memory": MemoryChannel.pair, "socket": SocketChannel.pair}


@pytest.fixture(params=sorted(MAKERS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = MAKERS[request.param]()
    yield made
    for end in made:
        end.close()


def test_messages_arrive_whole_and_in_order_both_ways(pair: Pair) -> None:
    for one, other in (pair, pair[::-1]):
        for message in (b"first", b"", b"third" * 100_000):
            one.send(message)
        assert [other.receive(1.0) for _ in range(3)] == [b"first", b"", b"third" * 100_000]


def test_the_sender_may_reuse_its_memory(pair: Pair) -> None:
    buffer = bytearray(b"before")
    pair[0].send(buffer)
    pair[0].send(memoryview(buffer)[1:3])
    buffer[:] = b"after!"
    assert pair[1].receive(1.0) == b"before"
    assert pair[1].receive(1.0) == b"ef"


def test_receiving_times_out(pair: Pair) -> None:
    with pytest.raises(TransportTimeoutError):
        pair[0].receive(0.01)
    with pytest.raises(TimeoutError):
        pair[0].receive(0.0)
    pair[1].send(b"late")
    assert pair[0].receive(1.0) == b"late"


def test_closing_delivers_what_was_sent_and_then_says_so(pair: Pair) -> None:
    pair[0].send(b"last")
    pair[0].close()
    pair[0].close()
    assert pair[1].receive(1.0) == b"last"
    for _ in range(2):
        with pytest.raises(PeerLostError):
            pair[1].receive(1.0)
    with pytest.raises(ConnectionError):
        pair[1].send(b"too late")


def test_a_closed_end_still_receives_but_does_not_send(pair: Pair) -> None:
    pair[1].send(b"on its way")
    pair[0].close()
    assert pair[0].receive(1.0) == b"on its way"
    with pytest.raises(ConfigError):
        pair[0].send(b"x")
    pair[1].close()
    with pytest.raises(PeerLostError):
        pair[0].receive(1.0)


@pytest.mark.parametrize("ends_by", ["send", "close"])
def test_a_waiting_receiver_is_woken(pair: Pair, ends_by: str) -> None:
    got: list[object] = []

    def receive() -> None:
        try:
            got.append(pair[1].receive(30.0))
        except PeerLostError as error:
            got.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    if ends_by == "send":
        pair[0].send(b"x")
    else:
        pair[0].close()
    waiting.join(30.0)
    assert not waiting.is_alive()
    assert got == [b"x"] if ends_by == "send" else isinstance(got[0], PeerLostError)
