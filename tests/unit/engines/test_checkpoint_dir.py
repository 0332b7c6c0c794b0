"""Whose directory it is, what it may be, and what tools make of it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from engine_cases import (
    FILES,
    METAS,
    as_bytes,
    change,
    draw,
    held_bits,
    records,
    spans,
    version_of,
)
from syncline.engines import CheckpointDir
from syncline.engines.checkpoint_dir import Mode, read_state
from syncline.errors import (
    BaseVersionError,
    CommitError,
    ConfigError,
    ForeignDirectoryError,
    FormatError,
    LayoutError,
)

OLD = {name: bits for name, bits in draw(1).items() if METAS[name].dtype in ("BF16", "F32", "U8")}
NEW = change(OLD, 2)
V1, V2 = version_of(1, OLD), version_of(2, NEW)
MODES: list[Mode] = ["in_place", "swap"]


def snapshot(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a directory, so that any touch shows."""
    return {
        str(entry.relative_to(path)): (
            entry.lstat().st_mode,
            entry.lstat().st_mtime_ns,
            entry.read_bytes() if entry.is_file() else b"",
        )
        for entry in [path, *path.rglob("*")]
    }


def created(path: Path, **options: Any) -> CheckpointDir:
    engine = CheckpointDir(path, **options)
    engine.create(V1, spans(OLD), FILES)
    return engine


def foreign(path: Path) -> Path:
    """A checkpoint that somebody else made, with the weights of version 1 that numpy can save."""
    path.mkdir()
    arrays = {
        name: bits.view("f4" if METAS[name].dtype == "F32" else "u1").reshape(METAS[name].shape)
        for name, bits in OLD.items()
        if METAS[name].dtype != "BF16"
    }
    save_file(arrays, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("content", ["notes.txt", ".hidden", "model.safetensors", "sub/x"])
def test_a_foreign_directory_is_not_touched(tmp_path: Path, mode: Mode, content: str) -> None:
    path = tmp_path / "model"
    (path / content).parent.mkdir(parents=True)
    (path / content).write_bytes(b"mine")
    before = snapshot(tmp_path)
    with pytest.raises(
        ForeignDirectoryError, match="not made by Syncline; nothing in it was touched"
    ):
        CheckpointDir(path, mode=mode)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("mode", MODES)
def test_a_file_is_not_touched(tmp_path: Path, mode: Mode) -> None:
    (tmp_path / "model").write_bytes(b"mine")
    with pytest.raises(ForeignDirectoryError):
        CheckpointDir(tmp_path / "model", mode=mode)
    assert (tmp_path / "model").read_bytes() == b"mine"


@pytest.mark.parametrize("mode", MODES)
def test_what_is_filled_meanwhile_is_not_touched(tmp_path: Path, mode: Mode) -> None:
    path = tmp_path / "model"
    engine = CheckpointDir(path, mode=mode)
    path.mkdir()
    (path / "notes.txt").write_bytes(b"mine")
    before = snapshot(path)
    with pytest.raises((ForeignDirectoryError, LayoutError, CommitError)):
        engine.create(V1, spans(OLD), FILES)
    assert snapshot(path) == before


@pytest.mark.parametrize("mode", MODES)
def test_a_name_that_we_would_build_in_is_not_touched(tmp_path: Path, mode: Mode) -> None:
    engine = CheckpointDir(tmp_path / "model", mode=mode)
    for name in (".model.syncline-new", ".model.syncline"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_bytes(b"mine")
    before = snapshot(tmp_path)
    with pytest.raises(ForeignDirectoryError, match="in the way"):
        engine.create(V1, spans(OLD), FILES)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("mode", MODES)
def test_a_link_where_we_would_build_is_not_followed(tmp_path: Path, mode: Mode) -> None:
    engine = CheckpointDir(tmp_path / "model", mode=mode)
    (tmp_path / "mine" / ".syncline").mkdir(parents=True)
    (tmp_path / "mine" / "notes.txt").write_bytes(b"mine")
    for name in (".model.syncline-new", ".model.syncline"):
        (tmp_path / name).symlink_to("mine")
    before = snapshot(tmp_path / "mine")
    with pytest.raises(ForeignDirectoryError):
        engine.create(V1, spans(OLD), FILES)
    assert snapshot(tmp_path / "mine") == before


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_directory_is_filled(tmp_path: Path, mode: Mode) -> None:
    (tmp_path / "model").mkdir()
    engine = created(tmp_path / "model", mode=mode)
    assert held_bits(engine) == as_bytes(OLD)


@pytest.mark.parametrize("mode", MODES)
def test_missing_parents_are_made(tmp_path: Path, mode: Mode) -> None:
    engine = created(tmp_path / "a" / "b" / "model", mode=mode)
    assert held_bits(engine) == as_bytes(OLD)


@pytest.mark.parametrize("mode", MODES)
def test_relative_paths(tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = created(Path("model"), mode=mode)
    monkeypatch.chdir("/")
    engine.apply(records(OLD, NEW), V2)
    assert held_bits(CheckpointDir(tmp_path / "model", mode=mode)) == as_bytes(NEW)


def test_the_modes_are_not_mixed_up(tmp_path: Path) -> None:
    created(tmp_path / "a")
    with pytest.raises(ConfigError, match="made in mode 'in_place'"):
        CheckpointDir(tmp_path / "a", mode="swap")
    engine = created(tmp_path / "b", mode="swap")
    for path in (tmp_path / "b", engine.path.resolve()):
        with pytest.raises(ConfigError, match="made in mode 'swap'"):
            CheckpointDir(path)
    with pytest.raises(ConfigError, match="mode"):
        CheckpointDir(tmp_path / "c", mode="both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shard_bytes"):
        CheckpointDir(tmp_path / "c", shard_bytes=0)


@pytest.mark.parametrize("shard_bytes", [1, 3000, 1 << 40])
@pytest.mark.parametrize("mode", MODES)
def test_other_tools_read_it(tmp_path: Path, mode: Mode, shard_bytes: int) -> None:
    path = created(tmp_path / "model", mode=mode, shard_bytes=shard_bytes).path
    shards = sorted(entry.name for entry in path.glob("*.safetensors"))
    loaded: dict[str, bytes] = {}
    for shard in shards:
        torch = pytest.importorskip("safetensors.torch")
        loaded |= {
            name: tensor.view(pytest.importorskip("torch").uint8).numpy().tobytes()
            if tensor.ndim
            else tensor.reshape(1).view(pytest.importorskip("torch").uint8).numpy().tobytes()
            for name, tensor in torch.load_file(path / shard).items()
        }
    assert loaded == as_bytes(OLD)
    if shard_bytes == 1 << 40:
        assert shards == ["model.safetensors"]
        assert not (path / "model.safetensors.index.json").exists()
    else:
        count = len(shards)
        assert shards == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(bits.nbytes for bits in OLD.values())
        assert index["weight_map"].keys() == OLD.keys()
        for shard in shards:
            size = sum(
                METAS[name].nbytes for name, at in index["weight_map"].items() if at == shard
            )
            assert size <= shard_bytes or list(index["weight_map"].values()).count(shard) == 1
    assert {name: (path / name).read_bytes() for name in FILES} == FILES


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "x.safetensors", "manifest.json"])
@pytest.mark.parametrize("mode", MODES)
def test_files_cannot_leave_the_directory(tmp_path: Path, mode: Mode, name: str) -> None:
    engine = CheckpointDir(tmp_path / "model", mode=mode)
    with pytest.raises(FormatError, match="name of a checkpoint's file"):
        engine.create(V1, spans(OLD), {name: b"x"})
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "x").exists()


def test_adopting(tmp_path: Path) -> None:
    path = foreign(tmp_path / "model")
    with pytest.raises(ForeignDirectoryError, match="adopt=True"):
        CheckpointDir(path)
    before = snapshot(path)
    engine = CheckpointDir(path, adopt=True)
    assert engine.held() is None
    assert snapshot(path) == before
    old = {name: bits for name, bits in OLD.items() if METAS[name].dtype != "BF16"}
    new = {name: bits for name, bits in NEW.items() if METAS[name].dtype != "BF16"}
    assert held_bits(engine) == as_bytes(old)
    engine.apply((), version_of(1, old))
    engine.apply(records(old, new), version_of(2, new))
    again = CheckpointDir(path)
    assert again.held() == version_of(2, new)
    assert held_bits(again) == as_bytes(new)
    assert load_file(path / "model.safetensors").keys() == new.keys()
    assert (path / "config.json").read_text() == "{}"


def test_a_failed_first_update_of_an_adopted_checkpoint(tmp_path: Path) -> None:
    path = foreign(tmp_path / "model")
    weights = (path / "model.safetensors").read_bytes()

    def fail() -> Any:
        raise ValueError("decoded")
        yield

    with pytest.raises(ValueError, match="decoded"):
        CheckpointDir(path, adopt=True).apply(fail(), V1)
    assert (path / "model.safetensors").read_bytes() == weights
    with pytest.raises(ForeignDirectoryError):
        CheckpointDir(path)
    assert CheckpointDir(path, adopt=True).held() is None


def test_adopting_what_is_ours_or_empty_changes_nothing(tmp_path: Path) -> None:
    created(tmp_path / "model", adopt=True)
    assert CheckpointDir(tmp_path / "model", adopt=True).held() == V1
    with pytest.raises(ConfigError, match="swap mode cannot take a checkpoint over"):
        CheckpointDir(tmp_path / "other", mode="swap", adopt=True)


SHARED: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "symbolic": (lambda blob, file: file.symlink_to(blob), "a symbolic link"),
    "hard": (lambda blob, file: file.hardlink_to(blob), "shared by a hard link"),
}


@pytest.mark.parametrize("kind", sorted(SHARED))
def test_shared_files_are_not_written_through(tmp_path: Path, kind: str) -> None:
    """As in a Hugging Face cache, or after `cp -l`."""
    link, message = SHARED[kind]
    path = foreign(tmp_path / "model")
    (path / "model.safetensors").rename(tmp_path / "blob")
    link(tmp_path / "blob", path / "model.safetensors")
    before = (tmp_path / "blob").read_bytes()
    with pytest.raises(ForeignDirectoryError, match=f"{message}.*copy the checkpoint"):
        CheckpointDir(path, adopt=True)
    assert (tmp_path / "blob").read_bytes() == before


@pytest.mark.parametrize("kind", sorted(SHARED))
def test_files_that_became_shared_are_not_written_through(tmp_path: Path, kind: str) -> None:
    link, message = SHARED[kind]
    engine = created(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "blob")
    link(tmp_path / "blob", tmp_path / "model" / "model.safetensors")
    with pytest.raises(ForeignDirectoryError, match=message):
        engine.apply(records(OLD, NEW), V2)
    assert engine.held() == V1
    assert held_bits(engine) == as_bytes(OLD)


@pytest.mark.parametrize("mode", MODES)
def test_another_process_is_kept_out(tmp_path: Path, mode: Mode) -> None:
    engine = created(tmp_path / "model", mode=mode)
    home = tmp_path / "model" / ".syncline" if mode == "in_place" else tmp_path / ".model.syncline"
    with (home / "lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(
            CommitError, match="being changed by another process; nothing was touched"
        ):
            engine.apply(records(OLD, NEW), V2)
        assert engine.held() == V1
        assert held_bits(engine) == as_bytes(OLD)
    engine.apply(records(OLD, NEW), V2)
    assert held_bits(engine) == as_bytes(NEW)


def test_two_creators_are_kept_apart(tmp_path: Path) -> None:
    first, second = CheckpointDir(tmp_path / "model"), CheckpointDir(tmp_path / "model")

    def meddling() -> Any:
        yield from list(spans(OLD))[:1]
        with pytest.raises(CommitError, match="another process"):
            second.create(V1, spans(OLD), FILES)
        yield from list(spans(OLD))[1:]

    first.create(V1, meddling(), FILES)
    assert held_bits(first) == as_bytes(OLD)
    with pytest.raises(LayoutError, match="holds a checkpoint already"):
        second.create(V1, spans(OLD), FILES)


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_was_overtaken_says_so(tmp_path: Path, mode: Mode) -> None:
    first = created(tmp_path / "model", mode=mode)
    second = CheckpointDir(tmp_path / "model", mode=mode)
    second.apply(records(OLD, NEW), V2)
    with pytest.raises(BaseVersionError, match="expected version 1, found version 2"):
        first.apply(records(OLD, NEW), V2)
    assert first.held() == V2
    assert held_bits(first) == as_bytes(NEW)
    first.apply(records(NEW, OLD), version_of(3, OLD))
    assert held_bits(second) == as_bytes(OLD)


@pytest.mark.parametrize("mode", MODES)
def test_applying_before_creating(tmp_path: Path, mode: Mode) -> None:
    engine = CheckpointDir(tmp_path / "model", mode=mode)
    with pytest.raises(LayoutError, match="holds no checkpoint yet"):
        engine.apply((), V1)
    with pytest.raises(LayoutError, match="holds no checkpoint yet"):
        engine.view("layer")


@pytest.mark.parametrize("mode", MODES)
def test_a_loader_can_ask_before_and_after(tmp_path: Path, mode: Mode) -> None:
    path = tmp_path / "model"
    assert read_state(path) is None
    seen = []

    def observe(_: object) -> None:
        state = read_state(path)
        seen.append(None if state is None else (state.is_changing, state.held))

    engine = CheckpointDir(path, mode=mode, observe=observe)
    engine.create(V1, spans(OLD), FILES)
    before = read_state(path)
    assert before is not None
    assert (before.is_changing, before.held) == (False, V1)
    engine.apply(records(OLD, NEW), V2)
    after = read_state(path)
    assert after is not None
    assert before != after
    assert (after.is_changing, after.held) == (False, V2)
    allowed = {None, (False, V1.sha256), (False, V2.sha256)}
    changing = {(True, V2.sha256)}
    found = {None if at is None else (at[0], at[1].sha256) for at in seen}
    assert found == (allowed | changing if mode == "in_place" else allowed)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    created(tmp_path / "model")
    (tmp_path / "model" / ".syncline" / "state.json").write_text("{}")
    with pytest.raises(FormatError, match=r"state\.json"):
        CheckpointDir(tmp_path / "model")
    with pytest.raises(FormatError, match=r"state\.json"):
        read_state(tmp_path / "model")


def test_a_half_built_directory_under_its_final_name_is_refused(tmp_path: Path) -> None:
    created(tmp_path / "model")
    state = tmp_path / "model" / ".syncline" / "state.json"
    document = json.loads(state.read_text())
    document.update(status="creating", held=None)
    state.write_text(json.dumps(document))
    with pytest.raises(CommitError, match="half-built"):
        CheckpointDir(tmp_path / "model")


def test_held_reads_the_state_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = created(tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    assert engine.held() == V1


def test_a_mount_point_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CheckpointDir(tmp_path / "model")

    def refuse(self: Path, target: Path) -> None:
        raise OSError(16, os.strerror(16))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CommitError, match=r"Device or resource busy; a mount point"):
        engine.create(V1, spans(OLD), FILES)
    assert list(tmp_path.iterdir()) == []
