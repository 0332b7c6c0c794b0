"""One writer at a time under a lease: dead holders, slow holders, and writes that are seen late."""

from __future__ import annotations

import pytest

from syncline.errors import FormatError, TransportTimeoutError, VersionConflictError
from syncline.stores.lease import Lease


class World:
    """A lease's object and a clock that only sleeping moves; `on_sleep` is what others do meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.record: bytes | None = None
        self.on_sleep: list = []

    def write(self, record: bytes) -> None:
        self.record = record

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.on_sleep:
            self.on_sleep.pop(0)()

    def lease(self, **more: float) -> Lease:
        return Lease(
            lambda: self.record,
            self.write,
            clock=lambda: self.now,
            sleep=self.sleep,
            **{"lasts_s": 10.0, "settle_s": 1.0, "wait_s": 60.0} | more,
        )


def test_tokens_rise_and_a_released_lease_is_free() -> None:
    world = World()
    for token in (1, 2, 3):
        with world.lease().held() as check:
            assert f'"token":{token}' in world.record.decode()
            check()
        assert '"owner":"0000000000000000"' in world.record.decode()
    assert world.now == 3.0


def test_of_two_claims_at_once_the_later_one_holds() -> None:
    """Both saw a free lease; what is left after the settling time is one claim."""
    world, other = World(), World()
    with other.lease().held():
        claim = other.record
    world.on_sleep = [lambda: world.write(claim)]  # they claim while we let time pass
    with world.lease().held() as check:
        assert world.record != claim
        assert world.now > 10  # waited until their claim was over: nobody released it
        check()


def test_a_dead_holder_keeps_others_out_only_so_long() -> None:
    world = World()
    dead = world.lease().held()
    dead.__enter__()
    before = world.now
    with world.lease().held() as check:
        check()
        assert 10 <= world.now - before <= 12.5


def test_a_dead_holder_is_named_when_the_wait_ends() -> None:
    world = World()
    dead = world.lease(lasts_s=1000).held()
    dead.__enter__()
    with pytest.raises(TransportTimeoutError, match="token 1"), world.lease().held():
        pass


def test_a_holder_that_was_too_slow_does_not_write() -> None:
    world = World()
    with world.lease().held() as check:
        check()
        world.now += 9.5
        with pytest.raises(VersionConflictError, match="nothing was written"):
            check()


def test_a_holder_that_was_replaced_does_not_write_nor_release() -> None:
    world = World()
    slow = world.lease().held()
    check = slow.__enter__()
    world.now += 20
    fast = world.lease().held()
    fast.__enter__()
    theirs = world.record
    with pytest.raises(VersionConflictError, match="token 2"):
        check()
    slow.__exit__(None, None, None)
    assert world.record == theirs


@pytest.mark.parametrize("record", [b"", b"{}", b'{"token":1}', b"x" * 5000])
def test_a_damaged_lease_is_refused(record: bytes) -> None:
    world = World()
    world.record = record
    with pytest.raises(FormatError, match="lease"), world.lease().held():
        pass
    assert world.record == record
