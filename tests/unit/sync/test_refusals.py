"""What must be refused with a clear error while the old version stays served."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from syncline import FilesystemStore, MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.errors import (
    BaseVersionError,
    ConfigError,
    ForeignDirectoryError,
    FormatError,
    LayoutError,
    SynclineError,
    VerifyError,
    VersionConflictError,
)
from syncline.sync.checks import check_link
from syncline.types import ObjectInfo, Step


def weights(value: float = 0.0) -> dict[str, np.ndarray]:
    out = {"a": np.arange(400, dtype=np.float32), "b": np.ones((3, 5), np.float16)}
    out["a"][17] += value
    return out


class Run:
    """A store with two versions on disk, and an engine that holds the first."""

    def __init__(self, root: Path, encoding: str) -> None:
        self.root = root
        self.store = FilesystemStore(root)
        self.publisher = Publisher(self.store, encoding=encoding)
        self.publisher.publish(weights())
        self.engine = MemoryEngine()
        self.receiver = Receiver(self.store, self.engine)
        self.receiver.sync()
        self.publisher.publish(weights(1.0))
        self.version = root / "weight_v000002"
        self.part = self.version / "model-00000-of-00001.safetensors"

    def refused(self, kind: type[SynclineError], match: str) -> None:
        """The next sync fails like this, and the engine still serves version 1, bit for bit."""
        with pytest.raises(kind, match=match):
            self.receiver.sync()
        held = self.engine.held()
        assert held is not None
        assert held.version == 1
        for name, array in weights().items():
            assert self.engine.view(name).tobytes() == array.tobytes()

    def edit_manifest(self, change: Callable[[dict[str, object]], None]) -> None:
        """Change the manifest and make HEAD name it again, as a faulty writer would."""
        path = self.version / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        raw = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        path.write_bytes(raw)
        head = json.loads((self.root / "HEAD.json").read_text())
        head["manifest_sha256"] = hashlib.sha256(raw).hexdigest()
        (self.root / "HEAD.json").write_text(json.dumps(head))


@pytest.fixture(params=["tight", "packed", "xor", "overwrite"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    return Run(tmp_path / "run", request.param)


def test_damaged_part(run: Run) -> None:
    raw = bytearray(run.part.read_bytes())
    raw[-1] ^= 1
    run.part.write_bytes(raw)
    run.refused(VerifyError, "model-00000-of-00001.safetensors: expected .* sha256")


def test_missing_part(run: Run) -> None:
    run.part.unlink()
    run.refused(FormatError, "missing model-00000-of-00001.safetensors")


def test_extra_part(run: Run) -> None:
    (run.version / "model-00001-of-00001.safetensors").write_bytes(b"")
    run.refused(FormatError, "extra model-00001-of-00001.safetensors")


def test_damaged_manifest(run: Run) -> None:
    path = run.version / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"kind":"delta"', b'"kind": "delta"'))
    run.refused(VerifyError, "manifest.json: expected sha256")


def test_unknown_key_in_a_manifest(run: Run) -> None:
    run.edit_manifest(lambda manifest: manifest.update(colour="red"))
    run.refused(FormatError, "colour")


def test_path_that_leaves_the_directory(run: Run) -> None:
    def change(manifest: dict[str, object]) -> None:
        manifest["parts"][0]["path"] = "../model-00000-of-00001.safetensors"  # type: ignore[index]

    run.edit_manifest(change)
    run.refused(FormatError, "path")


@pytest.mark.parametrize(
    ("key", "value"), [("name", "c"), ("dtype", "I32"), ("shape", [400, 1])], ids=str
)
def test_name_dtype_or_shape_that_is_not_in_the_base(run: Run, key: str, value: object) -> None:
    def change(manifest: dict[str, object]) -> None:
        manifest["tensors"][0][key] = value  # type: ignore[index]
        manifest["tensors"].sort(key=lambda entry: entry["name"])  # type: ignore[attr-defined]

    run.edit_manifest(change)
    run.refused(SynclineError, "a|c")


def test_engine_whose_bits_are_not_the_base(run: Run) -> None:
    """A bit that flipped in the engine at a place that changes is found before anything is written."""
    run.engine.bits("a")[17] ^= 1
    with pytest.raises(VerifyError, match="tensor 'a': expected fingerprint"):
        run.receiver.sync()
    assert run.engine.held().version == 1  # type: ignore[union-attr]


def test_an_engine_is_moved_over_to_another_run_by_repair(run: Run, tmp_path: Path) -> None:
    other = FilesystemStore(tmp_path / "other")
    Publisher(other).publish(weights())
    with pytest.raises(BaseVersionError, match="or move this one over with sync.repair=True."):
        Receiver(other, run.engine).sync()
    moved = Receiver(other, run.engine).sync(repair=True)
    assert run.engine.held().manifest.run_id == moved.run_id  # type: ignore[union-attr]
    assert Receiver(other, run.engine, verify="full").sync().version == 1


def test_full_version_repairs_a_damaged_engine(run: Run) -> None:
    run.engine.bits("a")[3] ^= 1
    run.publisher.publish(weights(2.0), full=True)
    assert run.receiver.sync().version == 3
    assert run.engine.view("a").tobytes() == weights(2.0)["a"].tobytes()


def test_verify_full_finds_a_bit_that_no_delta_touches(run: Run) -> None:
    run.engine.bits("a")[3] ^= 1
    with pytest.raises(VerifyError, match="1 of 2 tensors do not hold the bits of version 2: a"):
        Receiver(run.store, run.engine, verify="full").sync()


def test_version_from_another_run(run: Run, tmp_path: Path) -> None:
    other = FilesystemStore(tmp_path / "other")
    Publisher(other).publish(weights())
    with pytest.raises(BaseVersionError, match="the engine follows run"):
        Receiver(other, run.engine).sync()
    assert run.engine.held().version == 1  # type: ignore[union-attr]


def test_manifest_of_another_run_in_the_chain(run: Run) -> None:
    run.edit_manifest(lambda manifest: manifest.update(run_id="0" * 32))
    run.refused(FormatError, "the store mixes two runs")


def test_version_that_does_not_exist(run: Run) -> None:
    with pytest.raises(BaseVersionError, match="version 9 is not in this run"):
        run.receiver.sync(9)


def test_two_publishers_at_once_the_older_ones_commit_fails(run: Run) -> None:
    newer = Publisher(run.store)
    with pytest.raises(VersionConflictError, match="another publisher has taken the store over"):
        run.publisher.publish(weights(2.0))
    report = newer.publish(weights(3.0))
    assert report.version == 3
    assert run.receiver.sync().version == 3
    assert run.engine.view("a").tobytes() == weights(3.0)["a"].tobytes()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.pop("b"), "1 tensors of version 2 were not published: b"),
        (lambda w: w.update(c=w["b"]), "tensor 'c' is not in the base"),
        (
            lambda w: w.update(b=w["b"].astype(np.float32)),
            "tensor 'b': expected F16 .* found F32 .*; publish the working copy",
        ),
        (
            lambda w: w.update(b=w["b"].reshape(5, 3)),
            r"tensor 'b': expected F16 \[3, 5\] .*; another model needs a store of its own",
        ),
    ],
)
def test_weights_that_do_not_fit_the_base(
    run: Run, change: Callable[[dict[str, np.ndarray]], object], match: str
) -> None:
    bad = weights(5.0)
    change(bad)
    with pytest.raises(LayoutError, match=match):
        run.publisher.publish(bad)
    assert run.publisher.version == 2
    assert run.publisher.publish(weights(6.0)).version == 3
    run.receiver.sync()
    assert run.engine.view("a").tobytes() == weights(6.0)["a"].tobytes()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.update(b=w["b"].astype(np.float32)), "b is F32 .*give the engine the run's"),
        (lambda w: w.update(running_mean=w["b"]), r"unknown running_mean; .*state_dict\(\)"),
    ],
)
def test_an_engine_with_another_model_is_told_what_to_do(
    run: Run, change: Callable[[dict[str, np.ndarray]], object], match: str
) -> None:
    theirs, other = MemoryStore(), weights()
    change(other)
    Publisher(theirs).publish(other)
    engine = MemoryEngine()
    Receiver(theirs, engine).sync()
    with pytest.raises(LayoutError, match=match) as caught:
        Receiver(run.store, engine).sync(repair=True)
    assert ("state_dict" in str(caught.value)) == ("running_mean" in other)


def test_a_delta_with_other_tensors_than_its_base_is_the_versions_fault() -> None:
    manifests = []
    for names in ("ab", "ac"):
        store, engine = MemoryStore(), MemoryEngine()
        Publisher(store).publish({name: np.zeros(4, np.float32) for name in names})
        Receiver(store, engine).sync()
        manifests.append(engine.held().manifest)
    base, other = manifests
    delta = replace(other, kind="delta", version=2, fingerprint_before=base.fingerprint)
    with pytest.raises(FormatError, match="other tensors than version 1.*missing c; unknown b"):
        check_link(delta, base)


def test_reports_print_as_one_line_that_a_person_reads(run: Run) -> None:
    report = run.publisher.publish(weights(4.0))
    assert str(report).startswith("version 3 (delta): 1 of 415 changed (0.241%), ")
    assert str(run.receiver.sync()).startswith("version 3: applied 2, 3, 2 changed, ")
    assert str(run.receiver.sync()) == "version 3: held already"


@pytest.mark.parametrize("version", [2, "2", "weight_v000002"])
def test_a_version_goes_by_its_number_or_its_directorys_name(run: Run, version: int | str) -> None:
    assert run.receiver.sync(version).version == 2


@pytest.mark.parametrize("version", ["v2", "weight_v2", "-2", ""])
def test_a_version_by_another_name_is_refused(run: Run, version: str) -> None:
    with pytest.raises(ConfigError, match="expected a number .7, or weight_v000007"):
        run.receiver.sync(version)


def test_repeated_tensor(run: Run) -> None:
    pairs = [*weights().items(), *weights().items()]
    with pytest.raises(LayoutError, match="twice"):
        run.publisher.publish(pairs)


def test_wrong_base_for_a_publisher(run: Run, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(weights(9.0), tmp_path / "other.safetensors")
    with pytest.raises(BaseVersionError, match="those of no version of this run"):
        Publisher(run.store, base=tmp_path / "other.safetensors")


def test_empty_store() -> None:
    with pytest.raises(SynclineError, match=r"no HEAD\.json in a memory store"):
        Receiver(MemoryStore(), MemoryEngine()).sync()


def test_repair_puts_right_what_no_delta_touches(run: Run) -> None:
    """A full version with the same weights costs a follower nothing, so it cannot repair; this does."""
    run.receiver.sync()
    run.engine.bits("a")[3] ^= 1
    run.publisher.publish(weights(1.0), full=True)
    checked = Receiver(run.store, run.engine, verify="full")
    with pytest.raises(VerifyError, match="sync\\(repair=True\\)"):
        checked.sync()
    applied = checked.sync(repair=True)
    assert (applied.version, applied.changed) == (3, 1)
    assert run.engine.view("a").tobytes() == weights(1.0)["a"].tobytes()


def test_arguments_of_the_wrong_kind_are_named(run: Run) -> None:
    with pytest.raises(SynclineError, match=r"store: .* found str; make one with open_store"):
        Publisher("run")  # type: ignore[arg-type]
    with pytest.raises(SynclineError, match=r"engine: .* found dict; make one with TorchModule"):
        Receiver(run.store, {})  # type: ignore[arg-type]


def test_first_publisher_leaves_objects_alone_that_it_did_not_make() -> None:
    store = MemoryStore()
    store.put("weight_v000001/model.safetensors", [b"of another tool"])
    with pytest.raises(ForeignDirectoryError, match=r"no HEAD.json.*nothing was touched"):
        Publisher(store)
    assert store.get("weight_v000001/model.safetensors") == b"of another tool"


def test_name_that_is_not_text_is_refused_before_anything_is_stored() -> None:
    store = MemoryStore()
    with pytest.raises(LayoutError, match="is not text"):
        Publisher(store).publish({"\ud800": np.zeros(3, np.float32)})
    assert [info.key for info in store.list()] == ["HEAD.json"]


class Late(MemoryStore):
    """Runs something once, while an object is being put whose name ends in `suffix`."""

    def __init__(self, suffix: str, after: Callable[[], object]) -> None:
        super().__init__()
        self.suffix = suffix
        self.after: Callable[[], object] | None = after

    def put(self, key: str, chunks: Iterable[bytes]) -> None:
        held_back = list(chunks)
        if key.endswith(self.suffix) and self.after is not None:
            after, self.after = self.after, None
            after()
        super().put(key, held_back)


def test_part_that_a_fenced_publisher_finishes_late_does_not_spoil_the_version() -> None:
    split = {"a": np.zeros(100, np.float32), "b": np.zeros(100, np.float32)}
    whole = {name: value + 1 for name, value in split.items()}

    def put_late() -> None:
        # What was written, and checked, before the take-over and is linked only now.
        MemoryStore.put(store, "weight_v000001/model-00000-of-00002.safetensors", [b"late"])

    store = Late("model.safetensors.index.json", put_late)
    Publisher(store).publish(whole)
    engine = MemoryEngine()
    assert Receiver(store, engine).sync().version == 1
    assert (engine.view("a").view(np.float32) == 1).all()


def test_publisher_that_loses_the_store_while_a_part_is_written_does_not_put_it() -> None:
    split = {"a": np.zeros(100, np.float32), "b": np.zeros(100, np.float32)}

    class Slow(MemoryStore):
        is_armed = False

        def put(self, key: str, chunks: Iterable[bytes]) -> None:
            if self.is_armed and key.endswith("-of-00002.safetensors"):
                self.is_armed = False
                Publisher(self).publish({name: value + 1 for name, value in split.items()})
            super().put(key, chunks)

    store = Slow()
    old = Publisher(store, part_bytes=400)
    store.is_armed = True
    with pytest.raises(VersionConflictError):
        old.publish(split)
    engine = MemoryEngine()
    assert Receiver(store, engine).sync().version == 1
    assert (engine.view("b").view(np.float32) == 1).all()


def test_publisher_that_lost_the_store_puts_nothing_into_the_next_ones_way() -> None:
    """HEAD is looked at for each object: one look before the commit would let all parts of the older one come first."""
    split = {"a": np.zeros(100, np.float32), "b": np.zeros(100, np.float32)}
    wanted = {name: value + 1 for name, value in split.items()}
    has_cleaned, is_over = threading.Event(), threading.Event()

    class Paused(MemoryStore):
        def put(self, key: str, chunks: Iterable[bytes]) -> None:
            if threading.current_thread() is not threading.main_thread() and "00001-of" in key:
                began.set()
                has_cleaned.wait(60)
            super().put(key, chunks)

    def publish_in_between() -> None:
        with pytest.raises(VersionConflictError):
            old.publish(split)
        is_over.set()

    def let_the_old_one_go_on(step: Step) -> None:
        if step.name == "publish.leftovers_removed":
            has_cleaned.set()
            assert is_over.wait(60)

    began = threading.Event()
    store = Paused()
    old = Publisher(store, part_bytes=400)
    thread = threading.Thread(target=publish_in_between)
    thread.start()
    assert began.wait(60)
    new = Publisher(store, part_bytes=400, observe=let_the_old_one_go_on)
    assert new.publish(wanted).version == 1
    thread.join(60)
    engine = MemoryEngine()
    Receiver(store, engine).sync()
    assert (engine.view("b").view(np.float32) == 1).all()


def test_publisher_that_lost_the_store_removes_nothing_of_the_next_one() -> None:
    class Listed(MemoryStore):
        after: Callable[[], object] | None = None

        def list(self, prefix: str = "") -> list[ObjectInfo]:
            found = super().list(prefix)
            if prefix == "weight_v" and self.after is not None:
                after, self.after = self.after, None
                after()
            return found

    store = Listed()
    old = Publisher(store)
    store.put("weight_v000001/model-00000-of-00001.safetensors", [b"of a publisher that died"])
    store.after = lambda: Publisher(store).publish(weights(3.0))
    with pytest.raises(VersionConflictError):
        old.publish(weights())
    engine = MemoryEngine()
    assert Receiver(store, engine).sync().version == 1
    assert engine.view("a").tobytes() == weights(3.0)["a"].tobytes()
