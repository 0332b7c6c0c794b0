"""What a publish asks of a service without conditions: one claim of the lease, not one for every object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import obstore.store
import pytest

from syncline import MemoryEngine, Publisher, Receiver
from syncline.errors import StoreError, VersionConflictError
from syncline.stores.lease import Lease
from syncline.stores.patience import Patience
from syncline.stores.remote import RemoteStore
from syncline.stores.service import Service
from syncline.stores.writes import LEASE, Leased

PARTS = 10


class Counted:
    """A service that notes what it is asked, each request taking 10 ms of the `clock`; `before` is told first."""

    def __init__(self, service: obstore.store.MemoryStore) -> None:
        self._service = Service(service, Patience(1.0))
        self.calls: list[tuple[str, str]] = []
        self.slept: list[float] = []
        self.now_s = 0.0
        self.before: Callable[[str, str], None] = lambda name, key: None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(key: str, *args: Any, **more: Any) -> Any:
            self.before(name, key)
            self.calls.append((name, key))
            self.now_s += 0.01
            return getattr(self._service, name)(key, *args, **more)

        return call

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def lease(self) -> Lease:
        def read() -> bytes | None:
            found = self.read(LEASE)
            return None if found is None else found[0]

        return Lease(
            read,
            lambda record: self.write(LEASE, record),
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )

    def store(self) -> RemoteStore:
        return RemoteStore(
            self,
            name="counted",
            one_request_bytes=1 << 20,
            decide=lambda: Leased(self, self.lease()),
        )

    def settled(self) -> int:
        """How often a settling time was waited for."""
        return self.slept.count(1.0)

    def forget(self) -> None:
        self.calls.clear()
        self.slept.clear()


@pytest.fixture
def service() -> Counted:
    return Counted(obstore.store.MemoryStore())


def weights(value: float = 0.0) -> dict[str, np.ndarray]:
    return {f"layer.{i}": np.full(100, i + value, np.float32) for i in range(PARTS)}


def holds(engine: MemoryEngine, wanted: dict[str, np.ndarray]) -> bool:
    return all(engine.view(name).tobytes() == value.tobytes() for name, value in wanted.items())


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_publish_of_ten_parts_claims_the_lease_once(service: Counted, kind: str) -> None:
    publisher = Publisher(service.store(), part_bytes=400)
    publisher.publish(weights())
    service.forget()
    report = publisher.publish(weights(1.0), full=kind == "full")
    assert report.kind == kind
    count = Counter(service.calls)
    names = [key for name, key in service.calls if name == "write" and key != LEASE]
    assert len(names) == PARTS + 3  # index, manifest, HEAD
    assert len(set(names)) == len(names)
    assert service.settled() == 1
    # Claimed, let go, and renewed once: what follows is done within the settling time.
    assert count["write", LEASE] == 3
    # Looked at before each write, and for the claim, its settling, the renewal and the end.
    assert count["read", LEASE] == len(names) + 4
    engine = MemoryEngine()
    Receiver(service.store(), engine).sync()
    assert holds(engine, weights(1.0))


def test_a_publish_that_is_slow_lets_others_have_their_turn(service: Counted) -> None:
    """Each part takes six seconds: the lease is claimed four times in a minute, with a pause before the last three."""

    def before(name: str, key: str) -> None:
        if name == "write" and "safetensors" in key and "index" not in key:
            service.now_s += 6.0

    publisher = Publisher(service.store(), part_bytes=400)
    service.before = before
    service.forget()
    publisher.publish(weights())
    assert service.settled() == 4 + 3
    engine = MemoryEngine()
    Receiver(service.store(), engine).sync()
    assert holds(engine, weights())


def test_a_publish_that_loses_the_lease_in_the_middle_of_a_part_does_not_put_it(
    service: Counted,
) -> None:
    """The part took so long on the way to the check that the lease may be another's."""
    part = "weight_v000001/model-00004-of-00010.safetensors"

    def before(name: str, key: str) -> None:
        if (name, key) == ("has", part):
            service.before = lambda name, key: None
            service.now_s += 40.0

    publisher = Publisher(service.store(), part_bytes=400)
    service.before = before
    with pytest.raises(VersionConflictError, match="nothing was written"):
        publisher.publish(weights())
    assert ("write", part) not in service.calls
    assert publisher.version is None
    assert publisher.publish(weights()).version == 1
    engine = MemoryEngine()
    Receiver(service.store(), engine).sync()
    assert holds(engine, weights())


def test_a_publish_that_fails_lets_the_lease_go(service: Counted) -> None:
    def before(name: str, key: str) -> None:
        if name == "write" and key.endswith("00004-of-00010.safetensors"):
            raise StoreError("mine")

    publisher = Publisher(service.store(), part_bytes=400)
    service.before = before
    with pytest.raises(StoreError, match="mine"):
        publisher.publish(weights())
    found = service.read(LEASE)
    assert b'"owner":"0000000000000000"' in found[0]


def test_a_new_publisher_takes_over_from_one_that_commits_while_it_waits_for_the_lease(
    service: Counted,
) -> None:
    """The lease is the older one's until its version is committed; the newer one follows on that."""
    older = Publisher(service.store(), part_bytes=400)
    older.publish(weights())
    begun: list[str] = []

    def before(name: str, key: str) -> None:
        if name == "read" and key == LEASE and not begun:  # the newer one has read HEAD by now
            begun.append(key)
            older.publish(weights(1.0))

    service.before = before
    newer = Publisher(service.store(), part_bytes=400)
    assert begun
    assert newer.version == 2
    assert newer.publish(weights(2.0)).version == 3
    with pytest.raises(VersionConflictError, match="another publisher"):
        older.publish(weights(3.0))
