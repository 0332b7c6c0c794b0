"""Every rank publishes its own part: the version is the one that a single process publishes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from random_layouts import empty_shards, random_catalog, random_layout, random_values
from shard_files import case_paths, read_case
from syncline import MemoryEngine, MemoryStore, Publisher, Receiver, ShardedPublisher
from syncline.abc import WeightSource
from syncline.errors import (
    BaseVersionError,
    ConfigError,
    CoverageError,
    EndpointError,
    FormatError,
    LayoutError,
    OutcomeUnknownError,
    PlanDisagreementError,
    StoreError,
    SynclineError,
    TransportError,
    TransportTimeoutError,
    VerifyError,
    VersionConflictError,
)
from syncline.layouts import Layout, scatter
from syncline.layouts.sharded import Shard, Sharding, dtensor_layout, flat_layout
from syncline.sync import Ranks
from syncline.sync.history import History
from syncline.sync.metered import MeteredStore
from syncline.types import Bits, TensorMeta

Shards = dict[int, dict[str, Bits]]
WAIT_S = 60.0


class Canonical(WeightSource):
    """Whole tensors, as a single process has them."""

    def __init__(self, tensors: dict[str, tuple[TensorMeta, Bits]]) -> None:
        self._tensors = tensors

    def tensors(self):  # type: ignore[no-untyped-def]
        yield from self._tensors.values()


def on_all(size: int, act: Callable[[int], Any]) -> list[Any]:
    """Do something on every rank at once; return what each returned or raised."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
        assert not thread.is_alive(), "a rank hangs"
    return found


def all_well(found: list[Any]) -> list[Any]:
    for item in found:
        if isinstance(item, BaseException):
            raise item
    return found


def arrays(layout: Layout, shards: Shards, rank: int) -> dict[str, np.ndarray]:
    """A rank's bits in the shapes and dtypes of its local tensors."""
    import ml_dtypes

    types = {
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "I32": np.int32,
        "U8": np.uint8,
        "I64": np.int64,
    }
    tensors = next(p.tensors for p in layout.placements if p.rank == rank)
    return {t.name: shards[rank][t.name].view(types[t.dtype]).reshape(t.shape) for t in tensors}


def publishers(
    store: Any, layout: Layout, *, timeout_s: float = WAIT_S, **options: Any
) -> list[Any]:
    ranks = Ranks.threads(len(layout.placements), timeout_s=timeout_s)
    return on_all(len(ranks), lambda rank: ShardedPublisher(store, layout, ranks[rank], **options))


def publish(made: list[Any], layout: Layout, shards: Shards, **how: Any) -> list[Any]:
    return on_all(len(made), lambda r: made[r].publish(arrays(layout, shards, r), **how))


def assert_same_version(one: Any, other: Any) -> None:
    """Two stores hold the same version in canonical terms: bits, fingerprints, counts, kind."""
    engines = MemoryEngine(), MemoryEngine()
    manifests = []
    for store, engine in zip((one, other), engines, strict=True):
        Receiver(store, engine, verify="full").sync()
        current = History.open(store).current
        assert current is not None
        manifests.append(current.manifest)
    assert manifests[0].kind == manifests[1].kind
    assert manifests[0].fingerprint == manifests[1].fingerprint
    assert len(manifests[0].tensors) == len(manifests[1].tensors)
    for mine, theirs in zip(manifests[0].tensors, manifests[1].tensors, strict=True):
        assert (mine.meta, mine.fingerprint, mine.changed) == (
            theirs.meta,
            theirs.fingerprint,
            theirs.changed,
        )
        np.testing.assert_array_equal(
            engines[0].view(mine.meta.name), engines[1].view(mine.meta.name)
        )


def step(
    layout: Layout, canonical: dict[str, tuple[TensorMeta, Bits]], share: float, seed: int
) -> dict[str, tuple[TensorMeta, Bits]]:
    """Change a share of all elements; what is stored twice changes twice."""
    rng = np.random.default_rng(seed)
    new = {name: (meta, bits.copy()) for name, (meta, bits) in canonical.items()}
    for name, (_, bits) in new.items():
        if name.endswith(".embed_tokens.weight") and ".layers." in name:
            bits[:] = new["model.embed_tokens.weight"][1]
            continue
        if name.endswith("shared_head.head.weight"):
            bits[:] = new["lm_head.weight"][1]
            continue
        where = rng.random(bits.size) < share
        bits[where] ^= bits.dtype.type(1)
    return new


def scattered(layout: Layout, tensors: dict[str, tuple[TensorMeta, Bits]], shards: Shards) -> None:
    scatter(layout, [tensors[name] for name in layout.catalog], shards)


@pytest.fixture(
    scope="module", params=case_paths(), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.mark.parametrize("start", ["base", "shards"])
def test_megatron_ranks_publish_what_one_process_would(folder: Path, start: str) -> None:
    case = read_case(folder)
    layout, shards = case.layout(), case.bits()
    ours, theirs = MemoryStore(), MemoryStore()
    single = Publisher(theirs)
    base = folder.parent / "huggingface" if start == "base" else None
    made = all_well(publishers(ours, layout, base=base))
    if start == "shards":
        all_well(publish(made, layout, shards))
    single.publish(Canonical(case.checkpoint))
    assert_same_version(ours, theirs)
    tensors = case.checkpoint
    for seed, share in enumerate((0.01, 0.0, 0.6)):
        tensors = step(layout, tensors, share, seed)
        scattered(layout, tensors, shards)
        reports = all_well(publish(made, layout, shards))
        expected = single.publish(Canonical(tensors))
        assert {report.changed for report in reports} == {expected.changed}
        assert {report.version for report in reports} == {expected.version}
        assert_same_version(ours, theirs)
    all_well(publish(made, layout, shards, full=True))
    single.publish(Canonical(tensors), full=True)
    assert_same_version(ours, theirs)


METAS = [
    TensorMeta("a.weight", "F32", (6, 8)),
    TensorMeta("b.bias", "F32", (5,)),
    TensorMeta("norm.weight", "F32", (7,)),
]
CUT = {
    "a.weight": Sharding((2, 2), (Shard(0), Shard(1))),
    "b.bias": Sharding((2, 2), (None, Shard(0))),
    "norm.weight": Sharding((2, 2), (None, None)),
}
SMALL = dtensor_layout(METAS, CUT)


def some_weights(seed: int = 0) -> dict[str, tuple[TensorMeta, Bits]]:
    rng = np.random.default_rng(seed)
    return {m.name: (m, rng.integers(0, 99, m.count).astype(np.uint32)) for m in METAS}


def shards_of(layout: Layout, tensors: dict[str, tuple[TensorMeta, Bits]]) -> Shards:
    shards: Shards = {
        p.rank: {t.name: np.zeros(int(np.prod(t.shape)), np.uint32) for t in p.tensors}
        for p in layout.placements
    }
    scattered(layout, tensors, shards)
    return shards


class Run:
    """Four ranks with a first version in a store, and what a single publisher would have there."""

    def __init__(self, layout: Layout = SMALL, **options: Any) -> None:
        self.layout, self.store, self.tensors = layout, MemoryStore(), some_weights()
        self.made = all_well(publishers(self.store, layout, **options))
        self.shards = shards_of(layout, self.tensors)
        all_well(publish(self.made, layout, self.shards))

    def change(self, seed: int = 1) -> None:
        self.tensors = step(self.layout, self.tensors, 0.3, seed)
        scattered(self.layout, self.tensors, self.shards)

    def publish(self, **how: Any) -> list[Any]:
        return publish(self.made, self.layout, self.shards, **how)

    def assert_serves(self, version: int, tensors: dict[str, tuple[TensorMeta, Bits]]) -> None:
        engine = MemoryEngine()
        assert Receiver(self.store, engine, verify="full").sync().version == version
        for name, (_, bits) in tensors.items():
            np.testing.assert_array_equal(engine.view(name), bits)
        # Nothing is left of versions that were not committed.
        assert {int(i.key[8:14]) for i in self.store.list("weight_v")} == set(range(1, version + 1))


def test_a_tensor_on_several_ranks_is_one_payload() -> None:
    run = Run()
    run.change()
    all_well(run.publish())
    run.assert_serves(2, run.tensors)
    current = History.open(run.store).current
    assert current is not None
    assert {entry.encoding for entry in current.manifest.tensors} == {"packed", "tight"}
    assert len(current.manifest.parts) == len({entry.part for entry in current.manifest.tensors})


@pytest.mark.parametrize("encoding", ["packed", "indices"])
def test_encodings_that_look_at_changes_alone_can_be_chosen(encoding: str) -> None:
    run = Run(encoding=encoding)
    run.change()
    all_well(run.publish())
    run.assert_serves(2, run.tensors)
    current = History.open(run.store).current
    assert current is not None
    assert {entry.encoding for entry in current.manifest.tensors} == {encoding}


def test_flat_parameters_publish_too() -> None:
    layout = flat_layout({"flat": METAS}, 4)
    run = Run(layout)
    run.change()
    all_well(run.publish())
    run.assert_serves(2, run.tensors)


def test_anchors_follow_when_they_are_due() -> None:
    run = Run(anchor_every=2)
    for seed in range(3):
        run.change(seed)
        reports = all_well(run.publish())
        assert [report.anchor for report in reports] == [4 if seed == 1 else None] * 4
    manifests = [at.manifest for at in History.open(run.store).back()]
    assert [m.kind for m in reversed(manifests)] == ["full", "delta", "delta", "full", "delta"]
    run.assert_serves(5, run.tensors)


def test_every_window_of_a_large_tensor_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("part", "rounds", "shard"):
        monkeypatch.setattr(f"syncline.sync.sharded.{module}.WINDOW_UNITS", 5)
    run = Run()
    run.change()
    all_well(run.publish())
    run.assert_serves(2, run.tensors)
    all_well(run.publish(full=True))
    run.assert_serves(3, run.tensors)


@pytest.mark.parametrize("full", [False, True])
def test_a_drifted_replica_is_named_and_the_old_version_served(full: bool) -> None:
    run = Run()
    before = run.tensors
    run.change()
    run.shards[3]["norm.weight"][[2, 4]] ^= 7
    for error in run.publish(full=full):
        assert isinstance(error, VerifyError)
        text = "norm.weight: ranks 0 and 3 hold different copies; 2 elements differ"
        assert text in str(error)
        assert "[2, 4]" in str(error)
    run.assert_serves(1, before)
    scattered(run.layout, run.tensors, run.shards)
    all_well(run.publish())
    run.assert_serves(2, run.tensors)


def test_replicas_that_differ_from_the_start_are_named() -> None:
    store, shards = MemoryStore(), shards_of(SMALL, some_weights())
    made = all_well(publishers(store, SMALL))
    shards[2]["b.bias"][1] += 1
    for error in publish(made, SMALL, shards):
        assert isinstance(error, VerifyError)
        assert "b.bias: ranks 0 and 2 hold different copies; 1 elements differ" in str(error)
    assert [info.key for info in store.list()] == ["HEAD.json"]


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_fails_fails_all_and_nothing_is_committed(rank: int) -> None:
    run = Run()
    before = run.tensors
    run.change()
    lacking = dict(arrays(run.layout, run.shards, rank))
    del lacking["b.bias"]

    def act(r: int) -> Any:
        return run.made[r].publish(lacking if r == rank else arrays(run.layout, run.shards, r))

    for error in on_all(4, act):
        assert isinstance(error, LayoutError)
        assert "b.bias" in str(error)
    run.assert_serves(1, before)
    all_well(run.publish())
    run.assert_serves(2, run.tensors)


@pytest.mark.parametrize("error", [EndpointError("busy", status=503), StoreError("busy")])
def test_every_kind_of_error_reaches_the_other_ranks(error: SynclineError) -> None:
    ranks = Ranks.threads(3, timeout_s=5.0)

    def fail() -> bytes:
        raise error

    found = on_all(
        3, lambda rank: ranks[rank].together(fail if rank == 1 else bytes, lambda _: b"")
    )
    for one in found:
        assert isinstance(one, TransportError)
        assert "busy" in str(one)


def test_a_leader_that_cannot_clean_up_still_answers() -> None:
    ranks = Ranks.threads(3, timeout_s=5.0)

    def refuse(_: list[bytes]) -> bytes:
        raise StoreError("no room")

    def clean() -> None:
        raise RuntimeError("the observer")

    leader, *others = on_all(3, lambda rank: ranks[rank].together(bytes, refuse, on_failure=clean))
    assert isinstance(leader, RuntimeError)
    for one in others:
        assert isinstance(one, StoreError)
        assert "no room" in str(one)


def test_a_missing_rank_is_named_in_time() -> None:
    run = Run(timeout_s=0.5)
    before = run.tensors
    run.change()
    found = on_all(
        4,
        lambda r: None if r == 2 else run.made[r].publish(arrays(run.layout, run.shards, r)),
    )
    for rank in (0, 1, 3):
        assert isinstance(found[rank], TransportTimeoutError)
        assert "rank 2 did not send" in str(found[rank])
    run.assert_serves(1, before)


class Failing(MemoryStore):
    """Fails puts whose key ends so, as often as told."""

    ending, times = "", 0

    def put(self, key: str, chunks: Any) -> None:
        if self.times and key.endswith(self.ending):
            self.times -= 1
            raise StoreError(f"put {key}: no room")
        super().put(key, chunks)


@pytest.mark.parametrize("ending", ["00000-of-00003.safetensors", "00002-of-00003.safetensors"])
def test_a_part_that_cannot_be_written_keeps_the_old_version(ending: str) -> None:
    run = Run()
    store = Failing()
    store._objects = run.store._objects
    for made in run.made:
        made._store = MeteredStore(store)
    store.ending, store.times = ending, 1
    before = run.tensors
    run.change()
    for error in run.publish():
        assert isinstance(error, StoreError)
        assert "no room" in str(error)
    run.assert_serves(1, before)
    all_well(run.publish())
    run.assert_serves(2, run.tensors)


def test_a_publisher_that_lost_the_store_changes_nothing() -> None:
    run = Run()
    before = run.tensors
    Publisher(run.store)
    run.change()
    for error in run.publish():
        assert isinstance(error, VersionConflictError)
    run.assert_serves(1, before)


def test_a_store_that_goes_on_wants_its_current_version_as_base(tmp_path: Path) -> None:
    from syncline import CheckpointDir

    run = Run()
    Receiver(run.store, CheckpointDir(tmp_path / "engine")).sync()
    run.change()
    all_well(run.publish())
    for error in publishers(run.store, run.layout, base=tmp_path / "engine"):
        assert isinstance(error, BaseVersionError)
        assert "syncline pull" in str(error)
    for error in publishers(run.store, run.layout):
        assert isinstance(error, BaseVersionError)
        assert "no base was given" in str(error)
    Receiver(run.store, CheckpointDir(tmp_path / "engine")).sync()
    run.made = all_well(publishers(run.store, run.layout, base=tmp_path / "engine"))
    run.change(5)
    all_well(run.publish())
    run.assert_serves(3, run.tensors)


def test_what_ranks_must_agree_on_is_checked_before_anything_is_written() -> None:
    ranks = Ranks.threads(4, timeout_s=WAIT_S)
    other = dtensor_layout([*METAS[:2], TensorMeta("norm.weight", "F32", (8,))], CUT)
    found = on_all(
        4, lambda r: ShardedPublisher(MemoryStore(), other if r == 3 else SMALL, ranks[r])
    )
    assert all(isinstance(error, PlanDisagreementError) for error in found)
    with pytest.raises(ConfigError, match="whole tensors"):
        ShardedPublisher(MemoryStore(), SMALL, ranks[0], encoding="tight")
    with pytest.raises(ConfigError, match="link_bytes_per_s"):
        ShardedPublisher(MemoryStore(), SMALL, ranks[0], link_bytes_per_s=1e9)
    with pytest.raises(ConfigError, match="notify"):
        ShardedPublisher(MemoryStore(), SMALL, ranks[0], notify="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="4 ranks publish"):
        ShardedPublisher(MemoryStore(), flat_layout({"flat": METAS}, 2), ranks[0])


def test_a_layout_with_a_gap_is_refused() -> None:
    from dataclasses import replace

    first = SMALL.placements[0]
    holed = replace(first, blocks=first.blocks[1:])
    layout = Layout(SMALL.catalog, (holed, *SMALL.placements[1:]))
    for error in publishers(MemoryStore(), layout):
        assert isinstance(error, CoverageError)


class Forgetful(MemoryStore):
    """Swaps HEAD and loses the answer; may then not say what HEAD is either."""

    loses, is_mute = False, False

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        super().compare_and_swap(key, expected, new)
        if self.loses:
            raise StoreError(f"swap {key}: connection reset")

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if self.is_mute and self.loses and key == "HEAD.json" and self._has_swapped():
            raise StoreError(f"get {key}: connection refused")
        return super().get(key, start, stop)

    def _has_swapped(self) -> bool:
        return b'"version":2' in self._objects["HEAD.json"]


@pytest.mark.parametrize("is_mute", [False, True])
def test_a_lost_answer_of_the_store_is_looked_up_or_said_to_be_unknown(is_mute: bool) -> None:
    run = Run()
    store = Forgetful()
    store._objects = run.store._objects
    for made in run.made:
        made._store = MeteredStore(store)
    leader = run.made[0]._leader
    leader._store = leader._owner._store = store
    store.loses, store.is_mute = True, is_mute
    run.change()
    found = run.publish()
    run.assert_serves(2, run.tensors)
    if not is_mute:
        assert [report.version for report in all_well(found)] == [2] * 4
        return
    for error in (*found, *run.publish()):
        assert isinstance(error, OutcomeUnknownError)
        assert "new" in str(error)


def test_without_a_leader_the_outcome_is_unknown_and_nothing_changes() -> None:
    run = Run(timeout_s=0.3)
    before = run.tensors
    run.change()
    found = on_all(
        4, lambda r: None if r == 0 else run.made[r].publish(arrays(run.layout, run.shards, r))
    )
    for error in found[1:]:
        assert isinstance(error, OutcomeUnknownError)
        assert "rank 0 did not send what became of the step" in str(error)
    engine = MemoryEngine()
    assert Receiver(run.store, engine, verify="full").sync().version == 1
    for name, (_, bits) in before.items():
        np.testing.assert_array_equal(engine.view(name), bits)
    # Parts may be left, which no reader looks at; the leader of new publishers first removes them.
    publishers(run.store, run.layout)
    assert {info.key.split("/")[0] for info in run.store.list("weight_v")} == {"weight_v000001"}


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 5))
def test_any_layout_publishes_what_one_process_would(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    catalog = random_catalog(rng)
    layout = random_layout(catalog, ranks, rng)
    tensors, shards = random_values(catalog, rng), empty_shards(layout)
    ours, theirs = MemoryStore(), MemoryStore()
    single = Publisher(theirs)
    made = all_well(publishers(ours, layout))
    for share in (0.0, 0.2, 1.0):
        for _, bits in tensors.values():
            where = rng.random(bits.size) < share
            bits[where] ^= bits.dtype.type(3)
        scattered(layout, tensors, shards)
        all_well(publish(made, layout, shards))
        single.publish(Canonical(tensors))
        assert_same_version(ours, theirs)


@pytest.mark.parametrize("full", [False, True])
def test_what_is_damaged_between_ranks_is_found(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from syncline.sync.sharded import changes, gathering, publisher

    run = Run()
    before = run.tensors

    def packed(*args: Any) -> bytes:
        raw = bytearray(changes.pack(*args))
        raw[-1] ^= len(raw) > 200  # the last of the new bits, where there are any
        return bytes(raw)

    def zeros(self: Any, meta: TensorMeta, start: int, count: int) -> list[bytes]:
        return [bytes(len(piece)) for piece in whole(self, meta, start, count)]

    whole = gathering.Gathering.pieces
    if full:
        monkeypatch.setattr(gathering.Gathering, "pieces", zeros)
    else:
        monkeypatch.setattr(publisher, "pack", packed)
    run.change()
    for error in run.publish(full=full):
        assert isinstance(error, FormatError)
        assert "what was written" in str(error) if full else "arrived" in str(error)
    monkeypatch.undo()
    run.assert_serves(1, before)
    all_well(run.publish(full=full))
    run.assert_serves(2, run.tensors)
