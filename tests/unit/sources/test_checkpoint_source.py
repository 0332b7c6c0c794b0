"""Checkpoints on disk: mapped and not copied; which small files belong, and which never do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine_cases import change, draw, records, spans, version_of
from syncline.engines import CheckpointDir
from syncline.errors import ConfigError, LayoutError, StoreError
from syncline.sources import CheckpointSource
from syncline.types import Step, TensorMeta


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    save_file({"a": np.arange(6, dtype=np.float32)}, path / "model.safetensors")
    return path


def test_single_tensors_are_views_of_the_file(checkpoint: Path) -> None:
    source = CheckpointSource(str(checkpoint))
    assert source.path == checkpoint
    assert dict(source.metas()) == {"a": TensorMeta("a", "F32", (6,))}
    bits = source.bits("a")
    assert bits.view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert not bits.flags.writeable
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(np.float32(7).tobytes())
    assert bits.view(np.float32)[-1] == 7
    with pytest.raises(LayoutError, match="no tensor 'b'"):
        source.bits("b")


BELONG = {
    "config.json",
    "generation_config.json",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "qwen.tiktoken",
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
}
DO_NOT = {
    "modeling.py",
    "pytorch_model.bin",
    "training_args.pt",
    "optimizer.pth",
    "state.pkl",
    "library.so",
    ".env.json",
    ".gitattributes",
    "model.safetensors.index.json.bak",
    "pytorch_model.bin.index.json",
    "HEAD.json",
    "manifest.json",
    "adapter.safetensors",
    "data.npz",
}


def test_small_files(checkpoint: Path) -> None:
    for name in BELONG | DO_NOT:
        (checkpoint / name).write_bytes(name.encode())
    (checkpoint / "folder.json").mkdir()
    assert CheckpointSource(checkpoint).files() == {name: name.encode() for name in BELONG}
    assert CheckpointSource(checkpoint / "model.safetensors").files() == {}


def test_a_link_out_of_the_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (checkpoint / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"notes\.txt is a symbolic link to .*secret"):
        CheckpointSource(checkpoint).files()
    (checkpoint / "notes.txt").unlink()
    (checkpoint / "notes.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="symbolic link"):
        CheckpointSource(checkpoint).files()


def test_links_inside_and_into_a_hugging_face_cache_are_followed(
    checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "config.json").write_bytes(b"{}")
    (checkpoint / "LICENSE").symlink_to("config.json")
    assert CheckpointSource(checkpoint).files() == {"config.json": b"{}", "LICENSE": b"{}"}
    cache = tmp_path / "models--x"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (checkpoint / "model.safetensors").rename(blobs / "aa")
    (blobs / "bb").write_bytes(b"cached")
    (snapshot / "model.safetensors").symlink_to("../../blobs/aa")
    (snapshot / "config.json").symlink_to("../../blobs/bb")
    source = CheckpointSource(snapshot)
    assert source.files() == {"config.json": b"cached"}
    assert source.bits("a").size == 6


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x80\x05"])
def test_pickles_in_disguise_are_refused(checkpoint: Path, start: bytes) -> None:
    (checkpoint / "tokenizer.model").write_bytes(start + b"...")
    with pytest.raises(ConfigError, match=r"tokenizer\.model is a pickle"):
        CheckpointSource(checkpoint).files()


def test_a_large_file_is_refused(checkpoint: Path) -> None:
    with (checkpoint / "notes.txt").open("wb") as file:
        file.truncate((1 << 27) + 1)
    with pytest.raises(ConfigError, match=r"notes\.txt is over"):
        CheckpointSource(checkpoint).files()


def test_a_directory_that_is_being_changed_is_refused(tmp_path: Path) -> None:
    path, old = tmp_path / "model", draw(1)
    new = change(old, 2)
    seen = []

    def observe(step: Step) -> None:
        if step.name == "apply.record_written":
            with pytest.raises(StoreError, match="is being changed"):
                CheckpointSource(path)
            seen.append(step)

    engine = CheckpointDir(path, observe=observe)
    engine.create(version_of(1, old), spans(old), {})
    engine.apply(records(old, new), version_of(2, new))
    assert seen
    assert CheckpointSource(path).bits("layer").tobytes() == new["layer"].tobytes()


def test_a_directory_that_was_changed_meanwhile_is_noticed(tmp_path: Path) -> None:
    path, old = tmp_path / "model", draw(1)
    new = change(old, 2)
    engine = CheckpointDir(path)
    engine.create(version_of(1, old), spans(old), {})
    reading = CheckpointSource(path).tensors()
    next(reading)
    engine.apply(records(old, new), version_of(2, new))
    with pytest.raises(StoreError, match="was changed while it was read"):
        list(reading)


def test_a_small_file_that_cannot_be_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "config.json").write_bytes(b"{}")
    source = CheckpointSource(checkpoint)

    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StoreError, match=r"read .*config\.json: Permission denied"):
        source.files()
