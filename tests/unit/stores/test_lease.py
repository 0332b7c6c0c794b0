"""One writer at a time under a lease: dead holders, slow holders, and writes that are seen late."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from syncline.errors import FormatError, StoreError, TransportTimeoutError, VersionConflictError
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


def is_free(world: World) -> bool:
    return b'"owner":"0000000000000000"' in world.record


def test_writes_of_a_kept_lease_share_one_claim() -> None:
    world = World()
    lease = world.lease()
    with lease.kept():
        assert world.record is None  # nobody waits for one who does not write yet
        with lease.kept():
            for _ in range(4):
                with lease.held() as check:
                    check()
                    world.now += 0.5
        assert not is_free(world)
    assert is_free(world)
    assert world.now == 1 + 4 * 0.5  # settled once
    with lease.held() as check:
        check()
    assert is_free(world)


def test_a_kept_lease_is_let_go_after_an_error() -> None:
    world = World()
    lease = world.lease()
    with pytest.raises(ValueError, match="mine"), lease.kept(), lease.held():
        raise ValueError("mine")
    assert is_free(world)


def test_each_write_of_a_kept_lease_has_as_much_time_as_with_a_claim_of_its_own() -> None:
    world = World()
    lease = world.lease()
    with lease.kept():
        with lease.held() as check:
            check()
        world.now += 3
        with lease.held() as check:
            world.now += 8.9
            check()
            world.now += 0.2
            with pytest.raises(VersionConflictError, match="nothing was written"):
                check()


def test_a_renewed_lease_is_waited_for_from_its_renewal_on() -> None:
    world = World()
    lease = world.lease()
    with lease.kept():
        with lease.held():
            pass

        def write_again() -> None:
            with lease.held() as check:
                check()
            renewed_at.append(world.now)

        renewed_at: list[float] = []
        world.on_sleep = [lambda: None] * 15 + [write_again]  # another looks four times a second
        with world.lease().held() as theirs:
            assert world.now >= renewed_at[0] + 10
            theirs()


def test_a_kept_lease_is_let_go_in_time_for_those_who_wait() -> None:
    """A long publish keeps nobody out until the other's patience ends."""
    world = World()
    lease, order = world.lease(), []

    def other_writes() -> None:
        with world.lease().held() as check:
            check()
            order.append("other")

    with lease.kept():
        for number in range(6):
            world.on_sleep = [other_writes] if number == 4 else []
            with lease.held() as check:
                check()
                order.append(f"write {number}")
            world.now += 1
    assert order == ["write 0", "write 1", "write 2", "write 3", "other", "write 4", "write 5"]
    assert world.now < 12  # the other did not wait for the claim to be over


def test_a_kept_lease_that_another_has_taken_since_is_claimed_anew() -> None:
    world = World()
    slow = world.lease()
    with slow.kept():
        with slow.held() as old_check:
            pass
        world.now += 20
        with world.lease().held() as check:
            theirs = world.record
            with pytest.raises(VersionConflictError, match="token 2"):
                old_check()
            check()
            assert world.record == theirs
        with slow.held() as check:
            assert b'"token":3' in world.record
            check()


def test_a_kept_lease_that_was_taken_a_moment_ago_is_not_written_under() -> None:
    """A claim that is so young that it is not renewed is looked at all the same."""
    world = World()
    lease = world.lease()
    with lease.kept():
        with lease.held():
            pass
        world.record = world.record.replace(b'"token":1', b'"token":9')
        with lease.held() as check, pytest.raises(VersionConflictError, match="token 9"):
            check()
    assert b'"token":9' in world.record


def test_a_kept_lease_that_another_holds_is_not_renewed_over_it() -> None:
    world = World()
    lease = world.lease()
    with lease.kept():
        with lease.held():
            pass
        ours = json.loads(world.record)["owner"].encode()
        theirs = world.record.replace(b'"token":1', b'"token":9').replace(ours, b"f" * 16)
        world.record = theirs
        world.now += 3
        seen = []
        world.on_sleep = [lambda: seen.append(world.record)] * 30
        with lease.held() as check:
            check()
    assert seen[:30] == [theirs] * 30


@pytest.mark.parametrize(("slow", "writes"), [("look", 1), ("write", 3)])
def test_a_renewal_that_took_so_long_that_another_has_claimed_is_not_written_under(
    slow: str, writes: int
) -> None:
    """Its look is answered, or its write comes down, once the other's check has passed.

    After the look it writes nothing but a new claim; a write that came down late is let go first.
    """
    world, order = World(), []
    delays: list = []
    slept: list[float] = []
    wrote: list[bytes] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        world.sleep(seconds)

    def late(what: str) -> None:
        if slow == what and delays:
            delays.pop()()

    def read() -> bytes | None:
        found = world.record
        late("look")
        return found

    def write(record: bytes) -> None:
        late("write")
        wrote.append(record)
        world.record = record

    lease = Lease(read, write, lasts_s=10.0, clock=lambda: world.now, sleep=sleep)
    with ExitStack() as others, lease.kept():
        with lease.held() as check:
            check()
        world.now += 3

        def another_claims() -> None:
            others.enter_context(world.lease().held())()
            order.append(json.loads(world.record)["owner"])
            slept.clear()
            wrote.clear()

        delays.append(another_claims)
        with lease.held() as check:
            check()
            assert json.loads(world.record)["owner"] not in order
            assert len(wrote) == writes
            assert slept.count(1.0) == 2  # a turn for who waits, and a claim that settled
            order.append("mine")
    assert len(order) == 2


def forgetful(world: World, lost: list[str]) -> Lease:
    """Return a lease whose writes are made, with an answer lost for each of `lost`."""

    def write(record: bytes) -> None:
        world.record = record
        if lost:
            raise StoreError(lost.pop())

    return Lease(
        lambda: world.record, write, lasts_s=10.0, clock=lambda: world.now, sleep=world.sleep
    )


def renew_unheard(world: World, lost: list[str], lease: Lease) -> None:
    """Claim a lease, and renew it with a write whose answer is lost."""
    with lease.held() as check:
        check()
    world.now += 2
    lost.append("the answer")
    with pytest.raises(StoreError, match="the answer"), lease.held():
        pass


def test_a_holder_does_not_wait_for_its_own_renewal_whose_answer_was_lost() -> None:
    world, lost = World(), []
    lease = forgetful(world, lost)
    with lease.kept():
        renew_unheard(world, lost, lease)
        before = world.record
        with lease.held() as check:
            check()
        assert world.now == 1 + 2  # settled once, and waited for nobody
        assert (
            json.loads(world.record)["token"] > json.loads(before)["token"]
        )  # a change to be seen
    assert is_free(world)


def test_what_a_holder_whose_answer_was_lost_holds_is_let_go_at_the_end() -> None:
    world, lost = World(), []
    lease = forgetful(world, lost)
    with lease.kept():
        renew_unheard(world, lost, lease)
    assert is_free(world)


@pytest.mark.parametrize("record", [b"", b"{}", b'{"token":1}', b"x" * 5000])
def test_a_damaged_lease_is_refused(record: bytes) -> None:
    world = World()
    world.record = record
    with pytest.raises(FormatError, match="lease"), world.lease().held():
        pass
    assert world.record == record
