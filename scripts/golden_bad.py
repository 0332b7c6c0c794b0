"""Bad inputs: each breaks one rule of the format, and `cases.json` says what the refusal says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from golden_bad_payloads import write_payloads
from golden_runs import RUN_ID

from syncline.format import digest, manifest, names, part, strict_json, table, zstd

Edit = Callable[[dict[str, Any]], object]

DELTA = "small/weight_v000002"
FULL = "small/weight_v000001"
LONG = "many/weight_v000002"


class Cases:
    """Writes bad inputs and remembers them for `cases.json`."""

    def __init__(self, directory: Path, runs: Path) -> None:
        self.directory = directory
        self.runs = runs
        self.listed: list[dict[str, str]] = []

    def add(self, kind: str, name: str, data: bytes, says: str) -> Path:
        """Write one file that `kind` (head, manifest, part, payload) must refuse."""
        path = self.directory / kind / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        self.listed.append({"path": f"{kind}/{name}", "kind": kind, "says": says})
        return path

    def manifest(self, name: str, of: str, edit: Edit, says: str) -> None:
        """Write one manifest with one edit."""
        document = json.loads((self.runs / of / names.MANIFEST).read_bytes())
        edit(document)
        self.add("manifest", f"{name}.json", strict_json.dump(document), says)

    def sidecar(self, name: str, says: str, data: bytes, sha256: str | None = None) -> None:
        """Write one manifest, and the sidecar that it names, `NAME.json.zst`."""
        document = json.loads((self.runs / LONG / names.MANIFEST).read_bytes())
        document["tensors"]["size_bytes"] = len(data)
        document["tensors"]["sha256"] = digest.sha256(data) if sha256 is None else sha256
        self.add("manifest", f"{name}.json", strict_json.dump(document), says)
        (self.directory / "manifest" / f"{name}.json.zst").write_bytes(data)


def write_bad(directory: Path, runs: Path) -> None:
    """Write every bad input and the list of them; `runs` holds the golden runs."""
    cases = Cases(directory, runs)
    _heads(cases)
    _manifests(cases)
    _tables(cases)
    _sidecars(cases)
    _parts(cases)
    write_payloads(cases.add)
    _runs(cases)
    (directory / "cases.json").write_bytes(strict_json.dump(cases.listed))


def _heads(cases: Cases) -> None:
    good = (cases.runs / "history" / names.HEAD).read_bytes()
    version = b'"version":9'
    for name, old, new, says in (
        ("unknown-key", b'"epoch"', b'"colour":0,"epoch"', "colour is not a known key"),
        ("missing-key", b'"epoch":3,', b"", "epoch is missing"),
        ("repeated-key", b'"epoch":3', b'"epoch":3,"epoch":4', "'epoch' is there twice"),
        ("float", b'"epoch":3', b'"epoch":3.0', "epoch must be an integer"),
        ("nan", b'"epoch":3', b'"epoch":NaN', "must be finite"),
        ("epoch-0", b'"epoch":3', b'"epoch":0', "epoch must be an integer from 1"),
        ("newer", b'"format_version":1', b'"format_version":2', "upgrade"),
        ("other-format", b"syncline-head", b"syncline-hat", "format must be 'syncline-head'"),
        ("no-version", version, b'"version":null', "null exactly where version is"),
        ("run-id", RUN_ID.encode(), RUN_ID[1:].encode(), "run_id must be 32"),
        ("byte-order-mark", b'{"epoch"', b'\xef\xbb\xbf{"epoch"', "not JSON at character 0"),
        ("cut-short", b"}\n", b"", "not JSON"),
    ):
        if good.count(old) != 1:
            raise ValueError(old)
        cases.add("head", f"{name}.json", good.replace(old, new), says)
    cases.add("head", "empty.json", b"", "not JSON at character 0")


def _set(**members: object) -> Edit:
    return lambda document: document.update(members)


def _manifests(cases: Cases) -> None:
    for name, of, edit, says in (
        ("unknown-key", DELTA, _set(colour=0), "colour is not a known key"),
        ("missing-key", DELTA, lambda document: document.pop("epoch"), "epoch is missing"),
        ("newer", DELTA, _set(format_version=2, new=0), "upgrade"),
        ("version-0", DELTA, _set(version=0), "version must be an integer from 1"),
        ("version-beyond-64-bits", DELTA, _set(version=1 << 63), "version must be an integer"),
        ("kind", DELTA, _set(kind="patch"), "kind must be 'full' or 'delta'"),
        ("encoding", DELTA, _set(encoding="zip"), "encoding must be auto or one of"),
        (
            "base-not-before",
            DELTA,
            _set(base_version=2),
            "base_version must be an integer from 1 to 1",
        ),
        ("no-base-digest", DELTA, _set(base_sha256=None), "base_sha256 must be null exactly where"),
        (
            "no-base",
            DELTA,
            _set(base_version=None, base_sha256=None, fingerprint_before=None),
            "in a delta",
        ),
        (
            "no-fingerprint-before",
            DELTA,
            _set(fingerprint_before=None),
            "fingerprint_before must be null",
        ),
        ("fingerprint-sum", DELTA, _set(fingerprint="0" * 32), "the sum over the tensors"),
        ("mixed-interchange", DELTA, _set(encoding="xor"), "encoding must be one of ('xor',)"),
        (
            "files-in-a-delta",
            DELTA,
            _set(files=[_row("config.json")]),
            "files must be empty in a delta",
        ),
        ("path-leaves", FULL, _set(files=[_row("../config.json")]), "one plain file name"),
        ("path-absolute", FULL, _set(files=[_row("/etc/passwd")]), "one plain file name"),
        ("path-backslash", FULL, _set(files=[_row("a\\b")]), "one plain file name"),
        ("path-hidden", FULL, _set(files=[_row(".bashrc")]), "one plain file name"),
        ("path-nul", FULL, _set(files=[_row("a\0")]), "one plain file name"),
        (
            "path-reserved",
            FULL,
            _set(files=[_row("manifest.json")]),
            "a name that the format uses itself",
        ),
        (
            "path-weights",
            FULL,
            _set(files=[_row("x.safetensors")]),
            "a name that the format uses itself",
        ),
        (
            "files-twice",
            FULL,
            _set(files=[_row("a"), _row("a")]),
            "files[1].path must be after 'a'",
        ),
        ("part-path", FULL, _set(parts=[_row("../x.safetensors")]), "parts[0].path must be"),
        (
            "part-too-small",
            FULL,
            lambda document: document["parts"][0].update(size_bytes=99),
            "at least",
        ),
    ):
        cases.manifest(name, of, edit, says)
    text = (cases.runs / DELTA / names.MANIFEST).read_bytes()
    doubled = text.replace(b'"kind":', b'"kind":"delta","kind":')
    cases.add("manifest", "repeated-key.json", doubled, "'kind' is there twice")


def _row(path: str) -> dict[str, Any]:
    return {"path": path, "size_bytes": 1, "sha256": "0" * 64}


def _tables(cases: Cases) -> None:
    def row(of: int, **members: object) -> Edit:
        return lambda document: document["tensors"][of].update(members)

    def swap(document: dict[str, Any]) -> None:
        document["tensors"].reverse()

    def repeat(document: dict[str, Any]) -> None:
        document["tensors"].insert(0, document["tensors"][0])

    for name, edit, says in (
        ("table-unknown-key", row(0, colour=0), "tensors[0].colour is not a known key"),
        ("table-unsorted", swap, "in code point order"),
        ("table-twice", repeat, "tensors[1].name must be after"),
        ("table-name-empty", row(0, name=""), "must be a tensor's name"),
        ("table-name-metadata", row(0, name="__metadata__"), "must be a tensor's name"),
        ("table-dtype", row(0, dtype="BF17"), "dtype 'BF17' is not one of"),
        ("table-shape-negative", row(0, shape=[-1]), "shape[0] must be an integer"),
        ("table-shape-float", row(0, shape=[20.0, 12]), "shape[0] must be an integer"),
        ("table-shape-long", row(0, shape=[1] * 65), "at most 64 sides"),
        ("table-shape-huge", row(0, shape=[1 << 62, 4]), "at most 64 dimensions and"),
        ("table-half-byte", row(0, dtype="F4", shape=[3]), "do not fill whole bytes"),
        ("table-fingerprint", row(0, fingerprint="0" * 31), "32 lowercase hexadecimal digits"),
        ("table-encoding", row(0, encoding="zip"), "encoding must be one of"),
        ("table-changed-0", row(0, changed=0), "changed must be an integer from 1"),
        ("table-changed-too-many", row(0, changed=49), "changed must be an integer from 1 to 48"),
        ("table-part", row(0, part=1), "part must be an integer from 0 to 0"),
        ("table-half-null", row(0, part=None), "part must be the index of a part"),
    ):
        cases.manifest(name, DELTA, edit, says)
    full = lambda document: document["tensors"][0].update(encoding="packed")  # noqa: E731
    cases.manifest("table-delta-in-full", FULL, full, "in a full version")


def _sidecars(cases: Cases) -> None:
    rows = json.loads(
        zstd.decompress((cases.runs / LONG / names.SIDECAR).read_bytes(), "", limit_bytes=1 << 20)
    )
    good = zstd.compress(strict_json.dump(rows))
    bomb = zstd.compress(b" " * (table.MAX_TABLE_BYTES + 1))
    cases.sidecar("sidecar-digest", "the manifest names SHA-256", good, "0" * 64)
    cases.sidecar("sidecar-bomb", "at most 134217728 bytes may be in the zstd frame", bomb)
    cases.sidecar("sidecar-two-frames", "the zstd frame ends at offset", good * 2)
    cases.sidecar(
        "sidecar-short", "exactly if they are at most 64", zstd.compress(strict_json.dump(rows[:3]))
    )
    cases.sidecar("sidecar-not-zstd", "a zstd frame must begin here", strict_json.dump(rows[:3]))
    inside = _set(tensors=rows)
    cases.manifest("sidecar-inside", LONG, inside, "at most 64, found 66 inside")


def _parts(cases: Cases) -> None:
    """Write files that are not part 0 of the delta, whose manifest lies beside them."""
    value = manifest.load((cases.runs / DELTA / names.MANIFEST).read_bytes())
    good = (cases.runs / DELTA / value.parts[0].path).read_bytes()
    start = part.header_bytes(good, len(good), "")
    header, data = json.loads(good[8:start]), good[start:]
    shutil.copy(
        cases.runs / DELTA / names.MANIFEST, _made(cases.directory / "part") / names.MANIFEST
    )

    def add(
        name: str, says: str, edit: Edit | None = None, tail: bytes = b"", pad: int = 8
    ) -> None:
        document = json.loads(json.dumps(header))
        if edit is not None:
            edit(document)
        text = json.dumps(document, separators=(",", ":")).encode()
        text += b" " * (-len(text) % pad)
        content = len(text).to_bytes(8, "little") + text + data + tail
        cases.add("part", f"{name}.safetensors", content, says)

    first, second = list(header)[:2]
    offsets = header[second]["data_offsets"]
    extra = {"dtype": "U8", "shape": [1], "data_offsets": [len(data), len(data) + 1]}
    moved = [place + 1 for place in offsets]
    before = [place - 1 for place in offsets]
    add("hole", "without hole or overlap", lambda d: d[second].update(data_offsets=moved), b"\0")
    add("overlap", "without hole or overlap", lambda d: d[second].update(data_offsets=before))
    add("too-long", "the data must end at byte", tail=b"\0")
    add(
        "extra-tensor",
        "is there, but not in the manifest's table",
        lambda d: d.update(x=extra),
        b"\0",
    )
    add("dtype", "must be U8", lambda d: d[first].update(dtype="I8"))
    add("unknown-key", "is not a known key", lambda d: d[first].update(colour=0))
    add("metadata", "must be a string", lambda d: d.update(__metadata__={"a": 1}))
    add(
        "header-not-padded",
        "end on a multiple of 8",
        lambda d: d.update(__metadata__={"": ""}),
        pad=7,
    )
    cases.add("part", "cut-short.safetensors", good[:-1], "the data must end at byte")
    cases.add(
        "part", "header-too-long.safetensors", b"\xff" * 8 + good[8:], "header length must be"
    )
    none = part.encode([], lambda _: [])
    cases.add("part", "missing-tensor.safetensors", b"".join(none), "is missing")
    twice = b'{"a":{},"a":{}} '
    content = len(twice).to_bytes(8, "little") + twice
    cases.add("part", "repeated-name.safetensors", content, "'a' is there twice")


def _runs(cases: Cases) -> None:
    """Write runs of a full version and a delta of which one thing is wrong."""
    good = cases.runs / "small"
    part_path = f"weight_v000002/{names.part_name(0, 1)}"

    def add(name: str, says: str) -> Path:
        cases.listed.append({"path": f"run/{name}", "kind": "run", "says": says})
        target = _made(cases.directory / "run") / name
        return Path(shutil.copytree(good, target, ignore=shutil.ignore_patterns(names.INDEX)))

    def edited(name: str, says: str, edit: Edit) -> None:
        path = add(name, says)
        file = path / "weight_v000002" / names.MANIFEST
        document = json.loads(file.read_bytes())
        edit(document)
        file.write_bytes(strict_json.dump(document))
        pointer = json.loads((path / names.HEAD).read_bytes())
        pointer["manifest_sha256"] = digest.sha256(file.read_bytes())
        (path / names.HEAD).write_bytes(strict_json.dump(pointer))

    def swap_fingerprints(document: dict[str, Any]) -> None:
        first, second = document["tensors"][:2]
        first["fingerprint"], second["fingerprint"] = second["fingerprint"], first["fingerprint"]

    def rename(document: dict[str, Any]) -> None:
        next(row for row in document["tensors"] if row["part"] is None)["name"] += "x"

    edited("other-run", "run_id", _set(run_id="0" * 32))
    edited("other-base", "base_sha256", _set(base_sha256="0" * 64))
    edited("other-fingerprint-before", "fingerprint_before", _set(fingerprint_before="0" * 32))
    edited("later-epoch", "epoch", _set(epoch=2))
    edited("wrong-fingerprints", "fingerprint of tensor", swap_fingerprints)
    edited("unknown-tensor", "same tensors", rename)
    file = add("damaged-manifest", "manifest_sha256") / "weight_v000002" / names.MANIFEST
    file.write_bytes(file.read_bytes().replace(b'"epoch":1', b'"epoch":2'))
    file = add("damaged-part", "the manifest names SHA-256") / part_path
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    file = add("short-part", "the manifest names") / part_path
    file.write_bytes(file.read_bytes()[:-1])
    (add("missing-part", names.part_name(0, 1)) / part_path).unlink()
    (add("missing-manifest", names.MANIFEST) / "weight_v000002" / names.MANIFEST).unlink()


def _made(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path
