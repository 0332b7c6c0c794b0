"""A link that is flipped: what is shared between versions, what stays for readers, and what a failure leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from engine_cases import as_bytes, change, draw, held_bits, records, spans, version_of
from syncline.engines import CheckpointDir, checkpoint_dir, copying
from syncline.errors import CommitError, ForeignDirectoryError, FormatError
from syncline.types import Step

OLD = draw(1)
NEW = change(OLD, 2)
V1, V2 = version_of(1, OLD), version_of(2, NEW)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    engine = CheckpointDir(tmp_path / "model", mode="swap", shard_bytes=5000)
    engine.create(V1, spans(OLD), {"config.json": b"{}"})
    return tmp_path / "model"


def opened(path: Path) -> CheckpointDir:
    return CheckpointDir(path, mode="swap")


def versions(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path.parent / ".model.syncline").glob("v*"))


def name_of(version: object) -> str:
    return {1: f"v000001-{V1.sha256[:8]}", 2: f"v000002-{V2.sha256[:8]}"}[version]  # type: ignore[index]


def test_the_path_is_a_relative_link(path: Path, tmp_path: Path) -> None:
    assert path.readlink() == Path(".model.syncline") / name_of(1)
    (tmp_path / "moved").mkdir()
    for name in ("model", ".model.syncline"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert held_bits(opened(tmp_path / "moved" / "model")) == as_bytes(OLD)


def test_unchanged_files_are_shared_and_changed_ones_are_not(path: Path) -> None:
    before = path.resolve()
    new = {name: bits.copy() for name, bits in OLD.items()}
    new["layer"][3] ^= 1
    opened(path).apply(records(OLD, new), version_of(2, new))
    after = path.resolve()
    assert before != after
    shared = {
        entry.name
        for entry in after.iterdir()
        if entry.is_file() and entry.samefile(before / entry.name)
    }
    copied = {entry.name for entry in after.iterdir()} - shared - {".syncline"}
    assert len(copied) == 1
    assert copied.pop().endswith(".safetensors")
    assert {"config.json", "model.safetensors.index.json"} < shared
    assert held_bits(CheckpointDir(path, mode="swap")) == as_bytes(new)


def test_an_open_reader_keeps_the_version_it_opened(path: Path) -> None:
    reader = opened(path)
    views = {name: reader.view(name) for name in OLD}
    weights = OLD
    for number in range(2, 6):
        later = change(weights, number)
        opened(path).apply(records(weights, later), version_of(number, later))
        weights = later
    assert {name: view.tobytes() for name, view in views.items()} == as_bytes(OLD)
    assert held_bits(reader) == as_bytes(weights)


def test_the_version_before_stays_for_readers(path: Path) -> None:
    opened(path).apply(records(OLD, NEW), V2)
    assert versions(path) == [name_of(1), name_of(2)]
    later = change(NEW, 3)
    opened(path).apply(records(NEW, later), version_of(3, later))
    assert versions(path) == [name_of(2), path.resolve().name]


def test_the_same_version_again(path: Path) -> None:
    """Repairing weights without changing the version gives the directory another name."""
    for _ in range(3):
        opened(path).apply(records(OLD, NEW), V1)
        opened(path).apply(records(NEW, OLD), V1)
    assert held_bits(opened(path)) == as_bytes(OLD)
    assert versions(path) == [name_of(1), f"{name_of(1)}-again"]


@pytest.mark.parametrize(
    "step",
    [step for step in checkpoint_dir.STEPS if step.startswith("flip.")]
    + ["apply.record_written", "apply.flushed", "apply.verified"],
)
def test_an_error_at_any_step_leaves_the_old_version(path: Path, step: str) -> None:
    def observe(at: Step) -> None:
        if at.name == step:
            raise RuntimeError("observed")

    engine = CheckpointDir(path, mode="swap", observe=observe)
    with pytest.raises((CommitError, RuntimeError), match="observed"):
        engine.apply(records(OLD, NEW), V2)
    is_done = step == "flip.old_removed"
    for at in (engine, opened(path)):
        assert at.held() == (V2 if is_done else V1)
        assert held_bits(at) == as_bytes(NEW if is_done else OLD)
    if not is_done:
        assert versions(path) == [name_of(1)]
        assert not (path.parent / ".model.syncline" / "next").exists()
        opened(path).apply(records(OLD, NEW), V2)
    assert held_bits(opened(path)) == as_bytes(NEW)


@pytest.mark.parametrize("step", ["create.written", "flip.built", "flip.named", "flip.linked"])
def test_an_error_while_creating_leaves_nothing(tmp_path: Path, step: str) -> None:
    def observe(at: Step) -> None:
        if at.name == step:
            raise RuntimeError("observed")

    path = tmp_path / "model"
    with pytest.raises((CommitError, RuntimeError), match="observed"):
        CheckpointDir(path, mode="swap", observe=observe).create(V1, spans(OLD), {})
    assert not path.is_symlink()
    assert versions(path) == []
    engine = opened(path)
    assert engine.held() is None
    engine.create(V1, spans(OLD), {})
    assert held_bits(engine) == as_bytes(OLD)


@pytest.mark.parametrize("call", ["fsync", "link", "preadv", "pwrite", "open", "mkdir"])
def test_a_refusing_system_leaves_the_old_version(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(CommitError, match="No space left on device"):
            opened(path).apply(records(OLD, NEW), V2)
    assert opened(path).held() == V1
    assert held_bits(opened(path)) == as_bytes(OLD)
    assert versions(path) == [name_of(1)]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_without_hard_links_files_are_copied(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    before = path.resolve()
    monkeypatch.setattr(os, "link", refuse)
    opened(path).apply(records(OLD, NEW), V2)
    assert held_bits(opened(path)) == as_bytes(NEW)
    assert not (path / "config.json").samefile(before / "config.json")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS, errno.EINVAL])
@pytest.mark.parametrize("after_bytes", [0, 5])
def test_without_copy_file_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, after_bytes: int
) -> None:
    copy_file_range, calls = os.copy_file_range, []

    def refuse(source: int, target: int, count: int) -> int:
        calls.append(count)
        if after_bytes and len(calls) == 1:
            return copy_file_range(source, target, after_bytes)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    (tmp_path / "a").write_bytes(b"0123456789")
    copying.copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"0123456789"
    assert calls


def test_copy_errors_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a").write_bytes(b"x")
    monkeypatch.setattr(os, "copy_file_range", refuse)
    with pytest.raises(OSError, match="No space"):
        copying.copy_file(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("target", ["elsewhere", "../model2", ".model.syncline/other", "/"])
def test_a_link_that_we_did_not_make_is_not_touched(tmp_path: Path, target: str) -> None:
    (tmp_path / "model").symlink_to(target)
    with pytest.raises(ForeignDirectoryError, match="Syncline did not make"):
        opened(tmp_path / "model")
    assert str((tmp_path / "model").readlink()) == target


def test_a_link_to_a_version_without_state_is_refused(path: Path) -> None:
    (path / ".syncline" / "state.json").unlink()
    with pytest.raises(FormatError, match="must say clean"):
        opened(path)


def test_a_link_that_leads_nowhere_is_refused(path: Path) -> None:
    path.resolve().rename(path.parent / "gone")
    with pytest.raises(FormatError):
        opened(path)


def test_files_that_the_user_added_come_along(path: Path) -> None:
    (path / "notes.txt").write_bytes(b"mine")
    (path / "folder").mkdir()
    (path / "folder" / "deep.txt").write_bytes(b"mine too")
    (path / "link").symlink_to("notes.txt")
    opened(path).apply(records(OLD, NEW), V2)
    assert (path / "notes.txt").read_bytes() == b"mine"
    assert (path / "folder" / "deep.txt").read_bytes() == b"mine too"
    assert (path / "link").readlink() == Path("notes.txt")
