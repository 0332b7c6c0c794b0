"""S3 with something broken between: each fault ends in the right bytes, or in an error that loses nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from faulty_proxy import FaultyProxy
from s3_server import S3Server, s3_service
from syncline import MemoryEngine, Publisher, Receiver
from syncline.errors import (
    FormatError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    VerifyError,
    VersionConflictError,
)
from syncline.stores import LaggingStore, ObjectStore
from syncline.stores.streams import PIECE_BYTES, PUT_STREAMS, Width

LARGE = [bytes([number]) * (1 << 20) for number in range(20)]
PIECES = -(-20 * (1 << 20) // PIECE_BYTES)


@pytest.fixture
def store(faulty_proxy: FaultyProxy, s3_prefix: str) -> ObjectStore:
    return ObjectStore(
        s3_service(faulty_proxy.url, s3_prefix),
        one_request_bytes=1 << 20,
        deadline_s=20,
        writes="conditional",
    )


@pytest.fixture
def direct(s3_server: S3Server, s3_prefix: str) -> ObjectStore:
    """The same objects without the proxy."""
    return ObjectStore(s3_service(s3_server.url, s3_prefix), writes="conditional")


@pytest.mark.parametrize("status", [500, 503, 429])
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_failing_or_busy_service_is_asked_again(
    store: ObjectStore, faulty_proxy: FaultyProxy, method: str, status: int
) -> None:
    fault = faulty_proxy.add("status", method, status=status, times=2)
    store.put("v1/part", [b"whole"])
    assert store.get("v1/part") == b"whole"
    assert fault.hits == 2


def test_a_service_that_keeps_failing_ends_by_the_deadline(
    faulty_proxy: FaultyProxy, s3_prefix: str
) -> None:
    store = ObjectStore(s3_service(faulty_proxy.url, s3_prefix), deadline_s=0.5)
    faulty_proxy.add("status", "GET", times=10_000)
    with pytest.raises(StoreError, match=r"^get v1/part: .*500") as caught:
        store.get("v1/part")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["cut", "lost", "truncate"])
def test_a_get_whose_connection_is_cut_is_asked_again(
    store: ObjectStore, faulty_proxy: FaultyProxy, kind: str
) -> None:
    store.put("v1/part", [b"whole"])
    fault = faulty_proxy.add(kind, "GET", "v1/part")
    assert store.get("v1/part") == b"whole"
    assert fault.hits == 1


def test_only_the_range_that_was_cut_is_fetched_again(
    store: ObjectStore, faulty_proxy: FaultyProxy
) -> None:
    store.put("v1/part", LARGE)
    store._get_width = Width(PUT_STREAMS)
    before = faulty_proxy.count("GET", "v1/part")
    fault = faulty_proxy.add("truncate", "GET", "v1/part")
    assert b"".join(store.pieces("v1/part", 20 << 20)) == b"".join(LARGE)
    assert fault.hits == 1
    assert faulty_proxy.count("GET", "v1/part") - before == PIECES + 1


@pytest.mark.parametrize("kind", ["cut", "lost", "truncate"])
def test_the_rest_of_a_whole_object_that_was_cut_is_asked_for(
    store: ObjectStore, faulty_proxy: FaultyProxy, kind: str
) -> None:
    store.put("v1/part", LARGE)
    fault = faulty_proxy.add(kind, "GET", "v1/part", times=2)
    assert b"".join(store.pieces("v1/part", 20 << 20)) == b"".join(LARGE)
    assert fault.hits == 2
    ranges = [r for method, path, r in faulty_proxy.requests if method == "GET" and "part" in path]
    assert ranges[0] == ""
    if kind == "truncate":
        starts = [int(asked.removeprefix("bytes=").partition("-")[0]) for asked in ranges[1:]]
        assert starts == sorted(starts)
        assert starts[0] > 0


@pytest.mark.parametrize("kind", ["cut", "lost"])
def test_a_put_whose_answer_is_lost_is_known_for_its_own(
    store: ObjectStore, faulty_proxy: FaultyProxy, kind: str
) -> None:
    fault = faulty_proxy.add(kind, "PUT", "v1/part")
    store.put("v1/part", [b"whole"])
    assert fault.hits == 1
    assert store.get("v1/part") == b"whole"
    with pytest.raises(ObjectExistsError):
        store.put("v1/part", [b"whole"])


@pytest.mark.parametrize("kind", ["cut", "lost"])
@pytest.mark.parametrize("expected", [None, b"old"])
def test_a_swap_whose_answer_is_lost_is_known_for_its_own(
    store: ObjectStore, faulty_proxy: FaultyProxy, kind: str, expected: bytes | None
) -> None:
    if expected is not None:
        store.compare_and_swap("HEAD.json", None, expected)
    fault = faulty_proxy.add(kind, "PUT", "HEAD.json")
    store.compare_and_swap("HEAD.json", expected, b"new")
    assert fault.hits == 1
    assert store.get("HEAD.json") == b"new"
    with pytest.raises(VersionConflictError):
        store.compare_and_swap("HEAD.json", expected, b"new")


@pytest.mark.parametrize("kind", ["status", "cut", "lost"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "partNumber=2"), ("POST", "uploads"), ("POST", "v1/part?uploadId"), ("PUT", "v1/part?")],
    ids=["piece", "begin", "complete", "copy"],
)  # fmt: skip
def test_a_put_in_pieces_survives_a_fault_in_each_of_its_requests(
    store: ObjectStore, direct: ObjectStore, faulty_proxy: FaultyProxy, kind: str, method: str, path: str
) -> None:  # fmt: skip
    fault = faulty_proxy.add(kind, method, path)
    store.put("v1/part", LARGE)
    assert fault.hits == 1
    assert direct.get("v1/part") == b"".join(LARGE)
    assert [info.key for info in store.list()] == ["v1/part"]
    with pytest.raises(ObjectExistsError):
        store.put("v1/part", LARGE)


def test_a_put_in_pieces_that_cannot_go_on_leaves_nothing_to_see(
    store: ObjectStore, direct: ObjectStore, faulty_proxy: FaultyProxy, s3_server: S3Server
) -> None:
    before = s3_server.uploads("bucket")
    faulty_proxy.add("status", "PUT", "partNumber=2", times=10_000)
    with pytest.raises(StoreError, match=r"^put v1/part"):
        store.put("v1/part", LARGE)
    assert direct.list() == []
    assert s3_server.uploads("bucket") == before


def test_gets_use_many_connections_and_puts_too(
    store: ObjectStore, faulty_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", "4")
    faulty_proxy.pause_s = 0.05
    store.put("v1/part", LARGE)
    assert faulty_proxy.most_at_once >= 2
    faulty_proxy.most_at_once = 0
    store._get_width = Width(PUT_STREAMS)
    assert b"".join(store.pieces("v1/part", 20 << 20)) == b"".join(LARGE)
    assert faulty_proxy.most_at_once >= 2


def test_with_one_thread_nothing_is_fetched_ahead(
    store: ObjectStore, faulty_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", "1")
    store.put("v1/part", LARGE)
    faulty_proxy.most_at_once = 0
    assert b"".join(store.pieces("v1/part", 20 << 20)) == b"".join(LARGE)
    assert faulty_proxy.most_at_once == 1


def test_no_connection_at_all_is_an_error_of_one_line(s3_prefix: str) -> None:
    store = ObjectStore(s3_service("http://127.0.0.1:9", s3_prefix), deadline_s=0.2)
    with pytest.raises(StoreError, match=r"^get HEAD\.json: ") as caught:
        store.get("HEAD.json")
    assert "\n" not in str(caught.value)


# ---- what a run makes of it


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"a": rng.standard_normal(60_000).astype(np.float32), "b": np.arange(9, dtype=np.int64)}


def changed(old: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    new = {name: array.copy() for name, array in old.items()}
    new["a"][seed::97] += 1
    return new


def holds(engine: MemoryEngine, wanted: dict[str, np.ndarray]) -> bool:
    return all(
        np.array_equal(engine.view(name), array.view(engine.view(name).dtype))
        for name, array in wanted.items()
    )


@pytest.mark.parametrize("kind", ["flip", "shorten"])
def test_a_body_that_was_changed_on_the_way_is_fetched_again(
    store: ObjectStore, faulty_proxy: FaultyProxy, kind: str
) -> None:
    wanted = weights(1)
    Publisher(store).publish(wanted)
    fault = faulty_proxy.add(kind, "GET", ".safetensors")
    engine = MemoryEngine()
    Receiver(store, engine).sync()
    assert fault.hits == 1
    assert holds(engine, wanted)


@pytest.mark.parametrize("kind", ["flip", "shorten"])
@pytest.mark.parametrize("path", [".safetensors", "manifest.json", "HEAD.json"])
def test_a_body_that_is_always_changed_leaves_the_engine_as_it_was(
    store: ObjectStore, faulty_proxy: FaultyProxy, kind: str, path: str
) -> None:
    first = weights(1)
    second = changed(first, 3)
    publisher = Publisher(store)
    publisher.publish(first)
    engine = MemoryEngine()
    Receiver(store, engine).sync()
    publisher.publish(second)
    fault = faulty_proxy.add(kind, "GET", path, times=10_000)
    with pytest.raises((VerifyError, FormatError)):
        Receiver(store, engine).sync()
    assert holds(engine, first)
    assert engine.held().version == 1
    fault.times = fault.hits
    Receiver(store, engine).sync()
    assert holds(engine, second)


@pytest.mark.parametrize("path", [".safetensors", "manifest.json"])
def test_an_object_that_is_seen_late_is_waited_for(
    store: ObjectStore, faulty_proxy: FaultyProxy, path: str
) -> None:
    wanted = weights(2)
    Publisher(store).publish(wanted)
    fault = faulty_proxy.add("missing", "GET", path, times=3)
    engine = MemoryEngine()
    with pytest.raises(StoreError):
        Receiver(store, engine).sync()
    assert engine.held() is None
    fault.times += 2
    Receiver(LaggingStore(store, 60.0), engine).sync()
    assert holds(engine, wanted)


def test_an_object_that_is_listed_late_is_waited_for(
    store: ObjectStore, direct: ObjectStore
) -> None:
    wanted = weights(2)
    Publisher(store).publish(wanted)
    part = next(
        info.key
        for info in direct.list()
        if info.key.endswith("2.safetensors") or info.key.endswith("1.safetensors")
    )
    content = direct.get(part)
    direct.delete(part)
    engine = MemoryEngine()
    with pytest.raises(FormatError, match="missing"):
        Receiver(store, engine).sync()
    appearing = threading.Timer(0.5, direct.put, (part, [content]))
    appearing.start()
    Receiver(LaggingStore(store, 60.0), engine).sync()
    appearing.join()
    assert holds(engine, wanted)


def test_what_never_appears_ends_at_the_deadline(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"v1/part.*waited for 0\.05 s"):
        LaggingStore(store, 0.05).get("v1/part")


def test_the_older_of_two_publishers_is_fenced(store: ObjectStore, direct: ObjectStore) -> None:
    first = weights(1)
    older = Publisher(store)
    older.publish(first)
    newer = Publisher(direct)
    newer.publish(changed(first, 5))
    with pytest.raises(VersionConflictError, match="another publisher"):
        older.publish(changed(first, 7))
    engine = MemoryEngine()
    assert Receiver(store, engine).sync().version == 2
    assert holds(engine, changed(first, 5))


def test_a_publisher_that_lost_the_store_in_the_middle_of_its_put_commits_nothing(
    store: ObjectStore, direct: ObjectStore
) -> None:
    """The other takes over between the older one's last part and its HEAD."""
    first = weights(1)
    taken = []

    def take_over(step: object) -> None:
        if getattr(step, "name", "") == "publish.manifest_written" and len(steps) == 1:
            taken.append(Publisher(direct))
        if getattr(step, "name", "") == "publish.manifest_written":
            steps.append(step)

    steps: list[object] = []
    older = Publisher(store, observe=take_over)
    older.publish(first)
    with pytest.raises(VersionConflictError, match="another publisher"):
        older.publish(changed(first, 3))
    assert len(taken) == 1
    taken[0].publish(changed(first, 9))
    engine = MemoryEngine()
    assert Receiver(direct, engine).sync().version == 2
    assert holds(engine, changed(first, 9))


def test_a_small_delta_costs_few_requests(store: ObjectStore, faulty_proxy: FaultyProxy) -> None:
    weights = {"w": np.zeros(1000, np.float32)}
    publisher, receiver = Publisher(store), Receiver(store, MemoryEngine())
    publisher.publish(weights)
    receiver.sync()
    publisher.publish(weights | {"w": np.full(1000, 1, np.float32)})
    receiver.sync()
    before = len(faulty_proxy.requests)
    publisher.publish({"w": np.full(1000, 2, np.float32)})
    # Part, index and manifest, each after a look at HEAD; a listing; the swap of HEAD.
    assert len(faulty_proxy.requests) - before == 8
    before = len(faulty_proxy.requests)
    receiver.sync()
    assert len(faulty_proxy.requests) - before == 4  # HEAD, manifest, listing, part


def test_a_next_manifest_that_came_early_is_proved_or_asked_for_again(
    store: ObjectStore, faulty_proxy: FaultyProxy
) -> None:
    publisher, engine = Publisher(store), MemoryEngine()
    receiver = Receiver(store, engine)
    publisher.publish({"w": np.zeros(1000, np.float32)})
    receiver.sync()
    for version, kind in ((2, "flip"), (3, "missing")):
        publisher.publish({"w": np.full(1000, version, np.float32)})
        fault = faulty_proxy.add(kind, "GET", f"weight_v00000{version}/manifest.json")
        assert receiver.sync().version == version
        assert fault.hits == 1
    assert engine.view("w").view(np.float32).tolist() == [3.0] * 1000


@pytest.mark.parametrize("kind", ["", "flip", "missing"])
def test_the_table_of_many_tensors_comes_with_head_or_is_asked_for_again(
    store: ObjectStore, faulty_proxy: FaultyProxy, kind: str
) -> None:
    names = [f"w{number}" for number in range(70)]
    publisher, engine = Publisher(store), MemoryEngine()
    receiver = Receiver(store, engine)
    publisher.publish({name: np.zeros(10, np.float32) for name in names})
    receiver.sync()
    publisher.publish({name: np.full(10, 2, np.float32) for name in names})
    fault = faulty_proxy.add(kind, "GET", "weight_v000002/tensors.json.zst") if kind else None
    before = faulty_proxy.count("GET", "weight_v000002/tensors.json.zst")
    assert receiver.sync().version == 2
    times = faulty_proxy.count("GET", "weight_v000002/tensors.json.zst") - before
    assert times == (1 if fault is None else 2)
    assert engine.view("w69").view(np.float32).tolist() == [2.0] * 10


@pytest.mark.parametrize("kind", ["", "flip", "missing", "cut", "truncate", "shorten"])
def test_a_first_part_that_came_early_is_proved_or_asked_for_again(
    store: ObjectStore, faulty_proxy: FaultyProxy, kind: str
) -> None:
    publisher, engine = Publisher(store), MemoryEngine()
    receiver = Receiver(store, engine)
    for version in (1, 2):
        publisher.publish({"w": np.full(1000, version, np.float32)})
        receiver.sync()
    publisher.publish({"w": np.full(1000, 3, np.float32)})
    fault = faulty_proxy.add(kind, "GET", "weight_v000003/model") if kind else None
    before = len(faulty_proxy.requests)
    assert receiver.sync().version == 3
    assert engine.view("w").view(np.float32).tolist() == [3.0] * 1000
    assert fault is None or fault.hits == 1
    asked = [path for _, path, _ in faulty_proxy.requests[before:]]
    assert sum("weight_v000003/model" in path for path in asked) == (1 if fault is None else 2)
    before = len(faulty_proxy.requests)
    assert receiver.sync().version == 3
    assert (
        len(faulty_proxy.requests) - before == 3
    )  # HEAD; a manifest and a part that are not there


def test_a_first_part_of_a_version_that_is_not_committed_is_not_taken(
    store: ObjectStore,
) -> None:
    publisher, engine = Publisher(store), MemoryEngine()
    receiver = Receiver(store, engine)
    for version in (1, 2):
        publisher.publish({"w": np.full(1000, version, np.float32)})
        receiver.sync()
    store.put(
        "weight_v000003/model-00000-of-00001.safetensors", [b"of a publisher that lost the store"]
    )
    assert receiver.sync().version == 2
    Publisher(store).publish({"w": np.full(1000, 3, np.float32)})
    assert receiver.sync().version == 3
    assert engine.view("w").view(np.float32).tolist() == [3.0] * 1000


def test_small_parts_are_put_and_fetched_several_at_once(
    store: ObjectStore, faulty_proxy: FaultyProxy
) -> None:
    weights = {f"w{number}": np.zeros(1000, np.float32) for number in range(8)}
    publisher, engine = Publisher(store, part_bytes=4000), MemoryEngine()
    receiver = Receiver(store, engine)
    publisher.publish(weights)
    receiver.sync()
    faulty_proxy.pause_s = 0.02
    for direction in (publisher.publish, lambda _: receiver.sync()):
        faulty_proxy.most_at_once = 0
        direction({name: bits + 1 for name, bits in weights.items()})
        assert faulty_proxy.most_at_once >= 3
    assert engine.view("w7").view(np.float32).tolist() == [1.0] * 1000
