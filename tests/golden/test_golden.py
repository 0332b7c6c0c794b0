"""The golden files are what the script writes, read back as they should, and are refused if bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from safetensors import deserialize

from contracts.codecs import apply, windows_of
from syncline import codecs, kernels
from syncline.abc import Codec
from syncline.codecs.packed import Packed
from syncline.errors import BaseVersionError, SynclineError, VerifyError
from syncline.format import digest, head, index, manifest, names, part
from syncline.types import Bits, TensorMeta, unsigned
from syncline.version import HeldVersion, Manifest

GOLDEN = Path(__file__).parent
SCRIPT = GOLDEN.parents[1] / "scripts" / "make_golden.py"
CASES: list[dict[str, str]] = json.loads((GOLDEN / "bad" / "cases.json").read_text())


def files_of(directory: Path) -> dict[str, bytes]:
    """Return every golden file under a directory by its relative path."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    found = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    return {name: data for name, data in found.items() if not name.endswith((".py", ".pyc"))}


def test_the_script_writes_the_same_files_again(tmp_path: Path) -> None:
    release = ".".join(map(str, zstandard.ZSTD_VERSION))
    made_with = json.loads((GOLDEN / "golden.json").read_text())["zstd"]
    if release != made_with:
        pytest.skip(f"zstd {release} may compress otherwise than {made_with}, which made the files")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "error", SCRIPT, tmp_path], check=True, env=environment)
    made, kept = files_of(tmp_path), files_of(GOLDEN)
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == []


def test_the_files_stay_small() -> None:
    assert sum(map(len, files_of(GOLDEN).values())) < 500 << 10


def jsons(directory: str) -> list[Path]:
    found = sorted((GOLDEN / directory).glob("*.json"))
    if not found:
        raise FileNotFoundError(GOLDEN / directory)
    return found


def tensor_of(document: dict[str, Any]) -> tuple[TensorMeta, Bits, Bits]:
    meta = TensorMeta("w", document["dtype"], tuple(document["shape"]))
    old, new = (
        np.frombuffer(bytes.fromhex(document[key]), unsigned(meta.unit_bytes))
        for key in ("base", "new")
    )
    assert old.size == new.size == meta.unit_count
    return meta, old, new


@pytest.mark.parametrize("path", jsons("payloads"), ids=lambda path: path.stem)
def test_payloads_are_read_and_written(path: Path) -> None:
    document = json.loads(path.read_bytes())
    meta, old, new = tensor_of(document)
    assert np.count_nonzero(old != new) == document["changed"]
    assert set(document["payloads"]) == set(codecs.NAMES)
    payloads: list[tuple[Codec, str]] = [
        (codecs.get(name), text) for name, text in document["payloads"].items()
    ]
    payloads.append((Packed("xor"), document["packed_xor"]))
    for codec, text in payloads:
        payload = bytes.fromhex(text)
        assert (apply(old, codec.decode(meta, payload, old)) == new).all()
        # Whatever zstd release is in use, what it writes is read.
        again = codec.encode(meta, windows_of(meta, old, new, document["window_units"]))
        assert (apply(old, codec.decode(meta, b"".join(again), old)) == new).all()


@pytest.mark.parametrize("path", jsons("foreign"), ids=lambda path: path.stem)
def test_payloads_of_other_writers_are_read(path: Path) -> None:
    document = json.loads(path.read_bytes())
    meta, old, new = tensor_of(document)
    codec = codecs.get(document["encoding"])
    payload = bytes.fromhex(document["payload"])
    assert (apply(old, codec.decode(meta, payload, old)) == new).all()


def load_manifest(directory: Path) -> tuple[Manifest, bytes]:
    """Return a version's manifest and its bytes."""
    data = (directory / names.MANIFEST).read_bytes()
    wanted = manifest.wanted_sidecar(data)
    sidecar = None if wanted is None else (directory / wanted.path).read_bytes()
    return manifest.load(data, sidecar), data


def chain(run: Path) -> list[HeldVersion]:
    """Return the versions of a run from the first to the current one, checked as section 7 says."""
    pointer = head.load((run / names.HEAD).read_bytes())
    versions: list[HeldVersion] = []
    version, sha256, epoch = pointer.version, pointer.manifest_sha256, pointer.epoch
    while version is not None:
        value, data = load_manifest(run / names.version_dir(version))
        if digest.sha256(data) != sha256:
            raise VerifyError(f"version {version}: manifest_sha256 or base_sha256 names {sha256}")
        if value.run_id != pointer.run_id or value.version != version or value.epoch > epoch:
            raise BaseVersionError(f"version {version}: run_id, version or epoch do not fit")
        versions.append(HeldVersion(value, digest.sha256(data)))
        version, sha256, epoch = value.base_version, value.base_sha256, value.epoch
    return versions[::-1]


def contents(run: Path) -> Iterator[tuple[Manifest, dict[str, Bits]]]:
    """Yield every version of a run with the bits of all tensors."""
    held: dict[str, Bits] = {}
    before: Manifest | None = None
    for version in chain(run):
        value = version.manifest
        if before is not None and value.fingerprint_before != before.fingerprint:
            raise BaseVersionError("fingerprint_before is not the base's")
        if before is not None and [entry.meta for entry in before.tensors] != [
            entry.meta for entry in value.tensors
        ]:
            raise BaseVersionError("the base must have the same tensors")
        held = new_bits(run / names.version_dir(value.version), value, held)
        yield value, held
        before = value


def new_bits(directory: Path, value: Manifest, held: dict[str, Bits]) -> dict[str, Bits]:
    for file in value.files:
        digest.check(file, (directory / file.path).read_bytes())
    payloads: dict[str, memoryview] = {}
    for which, entry in enumerate(value.parts):
        data = (directory / entry.path).read_bytes()
        digest.check(entry, data)
        payloads |= part.load(data, value, which)
    found = dict(held)
    for row in value.tensors:
        meta = row.meta
        base = held.get(meta.name, np.zeros(meta.unit_count, unsigned(meta.unit_bytes)))
        if row.encoding is not None:
            decoded = codecs.get(row.encoding).decode(meta, payloads[meta.name], base)
            found[meta.name] = apply(base, decoded)
        if kernels.fingerprint(found[meta.name], 0, kernels.seeds(meta.name)) != row.fingerprint:
            raise VerifyError(f"the fingerprint of tensor {meta.name!r} is another")
    return found


@pytest.mark.parametrize(("name", "count"), [("history", 9), ("many", 2), ("small", 2)])
def test_runs_hold_what_was_published(name: str, count: int) -> None:
    run = GOLDEN / "runs" / name
    versions = list(contents(run))
    assert [value.version for value, _ in versions] == list(range(1, count + 1))
    for value, held in versions:
        path = run.with_name(f"{name}.expected") / f"{value.version:06d}.safetensors"
        expected = {tensor: info["data"] for tensor, info in deserialize(path.read_bytes())}
        assert {tensor: bits.tobytes() for tensor, bits in held.items()} == expected


def test_other_tools_read_a_full_version() -> None:
    directory = GOLDEN / "runs" / "history" / names.version_dir(1)
    weight_map = json.loads((directory / names.INDEX).read_bytes())["weight_map"]
    found = {}
    for path in directory.glob("*.safetensors"):
        for tensor, info in deserialize(path.read_bytes()):
            assert weight_map[tensor] == path.name
            found[tensor] = info["dtype"], tuple(info["shape"])
    value, _ = load_manifest(directory)
    assert found == {row.meta.name: (row.meta.dtype, row.meta.shape) for row in value.tensors}


@pytest.mark.parametrize("name", ["history", "many", "small"])
def test_the_index_and_the_manifest_are_written_again(name: str) -> None:
    for version in chain(GOLDEN / "runs" / name):
        directory = GOLDEN / "runs" / name / names.version_dir(version.version)
        assert index.dump(version.manifest) == (directory / names.INDEX).read_bytes()
        if not (directory / names.SIDECAR).exists():
            data, _ = manifest.dump(version.manifest)
            assert data == (directory / names.MANIFEST).read_bytes()


def test_every_kind_and_encoding_is_in_the_history() -> None:
    versions = [version.manifest for version in chain(GOLDEN / "runs" / "history")]
    kinds = [(value.kind, value.encoding) for value in versions]
    assert kinds == [
        ("full", "auto"),
        *(("delta", encoding) for encoding in ("packed", "xor", "overwrite", "planes", "full")),
        ("delta", "auto"),
        ("delta", "auto"),
        ("full", "packed"),
    ]
    used = {row.encoding for row in versions[6].tensors}
    assert used == {"packed", "planes", "xor", "full", None}
    assert all(row.encoding is None for row in versions[7].tensors)


def test_a_run_without_a_version_is_legal() -> None:
    assert chain(GOLDEN / "runs" / "unborn") == []


def refuse(case: dict[str, str]) -> None:
    """Read a bad input, which raises."""
    path = GOLDEN / "bad" / case["path"]
    if case["kind"] == "run":
        exhaust(contents(path))
    elif case["kind"] == "head":
        head.load(path.read_bytes())
    elif case["kind"] == "manifest":
        sidecar = path.with_name(f"{path.name}.zst")
        manifest.load(path.read_bytes(), sidecar.read_bytes() if sidecar.exists() else None)
    elif case["kind"] == "part":
        value = manifest.load((path.parent / names.MANIFEST).read_bytes())
        part.load(path.read_bytes(), value, 0)
    else:
        document = json.loads(path.read_bytes())
        meta = TensorMeta("w", document["dtype"], tuple(document["shape"]))
        payload = bytes.fromhex(document["payload"])
        base = np.arange(meta.unit_count, dtype=np.uint16)
        exhaust(codecs.get(document["encoding"]).decode(meta, payload, base))


def exhaust(items: Iterable[object]) -> None:
    for _ in items:
        pass


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["path"])
def test_bad_inputs_are_refused(case: dict[str, str]) -> None:
    with pytest.raises((SynclineError, FileNotFoundError)) as caught:
        refuse(case)
    assert case["says"] in str(caught.value)


def test_every_bad_input_is_listed() -> None:
    listed = {case["path"].split("/")[1].split(".")[0] for case in CASES}
    helpers = {"manifest", "cases"}
    found = {name.split("/")[1].split(".")[0] for name in files_of(GOLDEN / "bad") if "/" in name}
    assert found - helpers == listed
