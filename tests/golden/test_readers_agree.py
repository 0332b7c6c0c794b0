"""Two readers that share no code, Syncline's receiver and the stranger's, on every golden file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize

import second_reader
from syncline import FilesystemStore, MemoryEngine, Publisher, Receiver
from syncline.errors import SynclineError
from syncline.sync.fsck import check_store
from syncline.sync.history import History

GOLDEN = Path(__file__).parent
RUNS = ["history", "many", "small"]
CASES: list[dict[str, str]] = json.loads((GOLDEN / "bad" / "cases.json").read_text())
PAYLOADS = sorted((GOLDEN / "payloads").glob("*.json"))
FOREIGN = sorted((GOLDEN / "foreign").glob("*.json"))


def expected(name: str, version: int) -> dict[str, bytes]:
    path = GOLDEN / "runs" / f"{name}.expected" / f"{version:06d}.safetensors"
    return {tensor: bytes(info["data"]) for tensor, info in deserialize(path.read_bytes())}


@pytest.mark.parametrize("name", RUNS)
def test_the_second_reader_reads_every_run(name: str) -> None:
    versions = second_reader.read_run(GOLDEN / "runs" / name)
    assert len(versions) >= 2
    for version, tensors in versions.items():
        assert {tensor: data for tensor, (_, _, data) in tensors.items()} == expected(name, version)


@pytest.mark.parametrize("name", RUNS)
def test_the_receiver_follows_every_run(name: str) -> None:
    store = FilesystemStore(GOLDEN / "runs" / name)
    engine = MemoryEngine()
    versions = [at.version for at in History.open(store).back()][::-1]
    for version in versions:
        Receiver(store, engine, verify="full").sync(version)
        assert {t: engine.view(t).tobytes() for t in engine.tensors()} == expected(name, version)
    assert check_store(store, deep=True, observe=lambda step: None) == (len(versions), [])


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: path.stem)
def test_the_second_reader_decodes_every_payload(path: Path) -> None:
    document: dict[str, Any] = json.loads(path.read_bytes())
    base, new = bytes.fromhex(document["base"]), bytes.fromhex(document["new"])
    payloads = [*document["payloads"].items(), ("packed", document["packed_xor"])]
    assert len(payloads) > 1
    for encoding, text in payloads:
        shape = tuple(document["shape"])
        found = second_reader.decode(encoding, document["dtype"], shape, bytes.fromhex(text), base)
        assert found == new, encoding


@pytest.mark.parametrize("path", FOREIGN, ids=lambda path: path.stem)
def test_the_second_reader_decodes_what_other_writers_may_write(path: Path) -> None:
    document: dict[str, Any] = json.loads(path.read_bytes())
    found = second_reader.decode(
        document["encoding"],
        document["dtype"],
        tuple(document["shape"]),
        bytes.fromhex(document["payload"]),
        bytes.fromhex(document["base"]),
    )
    assert found == bytes.fromhex(document["new"])


def payload_cases() -> list[dict[str, str]]:
    return [case for case in CASES if case["kind"] == "payload"]


@pytest.mark.parametrize("case", payload_cases(), ids=lambda case: case["path"])
def test_the_second_reader_refuses_bad_payloads(case: dict[str, str]) -> None:
    document = json.loads((GOLDEN / "bad" / case["path"]).read_bytes())
    shape = tuple(document["shape"])
    base = np.arange(int(np.prod(shape)), dtype=np.uint16).tobytes()
    with pytest.raises(ValueError, match=r"\S"):
        second_reader.decode(
            document["encoding"], document["dtype"], shape, bytes.fromhex(document["payload"]), base
        )


def run_cases() -> list[str]:
    return [case["path"] for case in CASES if case["kind"] == "run"]


@pytest.mark.parametrize("path", run_cases())
def test_both_readers_refuse_bad_runs(path: str) -> None:
    run = GOLDEN / "bad" / path
    with pytest.raises((ValueError, OSError)):
        second_reader.read_run(run)
    with pytest.raises(SynclineError):
        Receiver(FilesystemStore(run), MemoryEngine()).sync()


@pytest.mark.parametrize(
    "encoding", ["auto", "xor", "overwrite", "packed", "tight", "planes", "full"]
)
def test_the_second_reader_reads_what_the_publisher_writes(
    encoding: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    w = {f"layer.{i}": rng.standard_normal((40, 30)).astype(np.float16) for i in range(70)}
    w |= {"scalar": np.array(1.5), "empty": np.empty((0, 2), np.int8)}
    publisher = Publisher(
        FilesystemStore(tmp_path / "run"), encoding=encoding, anchor_every=2, part_bytes=40_000
    )
    published = {}
    for share in (0.0, 0.01, 0.5, 0.0):
        for array in w.values():
            flat = array.reshape(-1)
            flat[rng.random(flat.size) < share] += 1
        report = publisher.publish(w)
        for version in {report.version, report.anchor} - {None}:
            published[version] = {name: array.tobytes() for name, array in w.items()}
    found = second_reader.read_run(tmp_path / "run")
    assert {v: {n: d for n, (_, _, d) in t.items()} for v, t in found.items()} == published
