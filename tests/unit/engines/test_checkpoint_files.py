"""Overwriting units of files: in blocks, exactly there and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from syncline.engines import checkpoint_files as module
from syncline.engines.checkpoint_files import CheckpointFiles, FileTarget
from syncline.errors import CommitError
from syncline.types import Record, unsigned


def directory(path: Path) -> Path:
    rng = np.random.default_rng(3)
    save_file(
        {
            f"t{unit_bytes}": rng.integers(0, 256, 1000 * unit_bytes, np.uint8).view(
                unsigned(unit_bytes)
            )
            for unit_bytes in (1, 2, 4, 8)
        },
        path / "model.safetensors",
    )
    return path


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sets(st.integers(0, 899), max_size=40),
    st.integers(0, 100),
    st.sampled_from([1, 7, 64, 5000]),
)
def test_the_places_of_a_record_and_no_others(
    tmp_path_factory: pytest.TempPathFactory,
    unit_bytes: int,
    places: set[int],
    start: int,
    block_units: int,
) -> None:
    path = directory(tmp_path_factory.mktemp("model"))
    name = f"t{unit_bytes}"
    before = {name: bits.copy() for name, bits in views(path).items()}
    offsets = np.array(sorted(places), np.uint32)
    new = np.arange(offsets.size).astype(unsigned(unit_bytes))
    record = Record(name, start, offsets, before[name][start + offsets], new)
    with pytest.MonkeyPatch.context() as patch, FileTarget(CheckpointFiles(path).places) as target:
        patch.setattr(module, "_BLOCK_UNITS", block_units)
        assert np.array_equal(target.read(record), record.old_bits)
        target.write(record, new)
        assert np.array_equal(target.read(record), new)
        target.flush()
    before[name][start + offsets] = new
    after = views(path)
    assert all(np.array_equal(after[name], bits) for name, bits in before.items())


def views(path: Path) -> dict[str, np.ndarray]:
    files = CheckpointFiles(path)
    return {name: files.view(name) for name in files.metas()}


@pytest.mark.parametrize("unit_bytes", [1, 2, 4, 8])
def test_dense_records(tmp_path: Path, unit_bytes: int) -> None:
    path = directory(tmp_path)
    name = f"t{unit_bytes}"
    before = views(path)[name].copy()
    new = before[10:30] ^ unsigned(unit_bytes).type(1)
    record = Record(name, 10, None, before[10:30], new)
    with FileTarget(CheckpointFiles(path).places) as target:
        assert np.array_equal(target.read(record), record.old_bits)
        target.write(record, new[::-1])
        assert np.array_equal(target.read(record), new[::-1])
    before[10:30] = new[::-1]
    assert np.array_equal(views(path)[name], before)


def test_short_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory(tmp_path)
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    bits = np.arange(5, dtype=np.uint32)
    record = Record("t4", 7, None, bits, bits)
    with FileTarget(CheckpointFiles(path).places) as target:
        target.write(record, bits)
        assert np.array_equal(target.read(record), bits)


def test_a_file_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    path = directory(tmp_path)
    places = CheckpointFiles(path).places
    os.truncate(path / "model.safetensors", 500)
    bits = np.zeros(1000, np.uint8)
    with (
        FileTarget(places) as target,
        pytest.raises(CommitError, match=r"model\.safetensors: it ends"),
    ):
        target.read(Record("t1", 0, None, bits, bits))


def test_the_system_s_reason_is_told(tmp_path: Path) -> None:
    path = directory(tmp_path)
    places = CheckpointFiles(path).places
    (path / "model.safetensors").unlink()
    bits = np.zeros(1, np.uint8)
    with FileTarget(places) as target, pytest.raises(CommitError, match="No such file"):
        target.write(Record("t1", 0, None, bits, bits), bits)
