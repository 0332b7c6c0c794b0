"""Golden directories of foreign layouts, written from their descriptions with nothing of Syncline's.

layouts/NAME/           what the publisher of a layout leaves in a store
layouts/NAME.expected/  the weights before (base) and at every version, as safetensors files
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

# dtype, shape, little-endian bits
Tensor = tuple[str, tuple[int, ...], NDArray[Any]]
State = Mapping[str, Tensor]

FLOATS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "model.embed.weight": ("BF16", (33, 7)),
    "model.layers.0.mlp.weight": ("BF16", (5, 41)),
    "model.norm.weight": ("BF16", (19,)),
}
ALL_KINDS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    **FLOATS,
    "model.layers.0.experts.weight": ("F8_E4M3", (3, 4, 5)),
    "model.layers.0.scale": ("F32", ()),
    "model.layers.0.none": ("BF16", (0, 4)),
    "model.rotary.positions": ("I64", (9,)),
}
_WIDTHS = {"BF16": 2, "F16": 2, "F8_E4M3": 1, "F32": 4, "I64": 8}
_TORCH = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F32": "float32",
    "I64": "int64",
}
_NAN, _MINUS_ZERO = 0x7FC1, 0x8000


def write_layouts(directory: Path) -> None:
    """Write every golden directory."""
    _write(directory / "trl-v1", FLOATS, _trl(generation=1, encoding="raw"))
    _write(directory / "trl-v3-raw", FLOATS, _trl(generation=3, encoding="raw"))
    _write(directory / "trl-v3-gap_delta", FLOATS, _trl(generation=3, encoding="gap_delta"))
    for codec in ("v2", "v3", "v3.1"):
        _write(directory / f"grail-{codec}", FLOATS, _grail(codec))
    _write(directory / "skyrl", ALL_KINDS, _skyrl)
    for arc in ("arc_v1", "arc_v2"):
        _write(directory / f"fireworks-{arc}", ALL_KINDS, _fireworks(arc))


def _write(
    directory: Path,
    model: Mapping[str, tuple[str, tuple[int, ...]]],
    writer: Callable[[Path, list[State]], Mapping[str, int]],
) -> None:
    states = _states(model)
    directory.mkdir(parents=True)
    expected = directory.with_name(directory.name + ".expected")
    expected.mkdir()
    (expected / "base.safetensors").write_bytes(_safetensors(states[0]))
    for identity, number in writer(directory, states).items():
        (expected / f"{identity}.safetensors").write_bytes(_safetensors(states[number]))


def _states(model: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[State]:
    """Return four states: random bits, two steps with NaN and -0.0 among the new values, and no step."""
    rng = np.random.default_rng(20260731)
    first = {}
    for name, (dtype, shape) in model.items():
        count = int(np.prod(shape))
        raw = rng.integers(0, 256, count * _WIDTHS[dtype], np.uint8)
        first[name] = (dtype, shape, raw.view(f"<u{_WIDTHS[dtype]}"))
    states: list[State] = [first]
    for step in range(2):
        state = {}
        for name, (dtype, shape, bits) in states[-1].items():
            new = bits.copy()
            if not (step and name == "model.norm.weight"):
                new[rng.random(new.size) < 0.12] ^= new.dtype.type(3)
                new[-1:] ^= new.dtype.type(1)
            if name == "model.embed.weight":
                new[[0, 100]] = (_NAN + step, _MINUS_ZERO + step)
            state[name] = (dtype, shape, new)
        states.append(state)
    return [*states, states[-1]]


def _changed(old: State, new: State) -> dict[str, tuple[NDArray[np.int64], NDArray[Any]]]:
    found = {}
    for name, (_, _, bits) in new.items():
        positions = np.flatnonzero(old[name][2] != bits)
        if positions.size:
            found[name] = (positions, bits[positions])
    return found


def _safetensors(state: State, metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, shape, bits) in sorted(state.items(), key=lambda item: -item[1][2].itemsize):
        raw = bits.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _flat(dtype: str, array: NDArray[Any]) -> Tensor:
    return dtype, (array.size,), array


def _bytes(raw: bytes) -> Tensor:
    return _flat("U8", np.frombuffer(raw, np.uint8))


def _xor(old: State, new: State, name: str) -> bytes:
    return (old[name][2] ^ new[name][2]).tobytes()


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _trl(generation: int, encoding: str) -> Callable[[Path, list[State]], Mapping[str, int]]:
    def write(directory: Path, states: list[State]) -> Mapping[str, int]:
        _put(
            directory / "anchors" / "step_000004.safetensors",
            _safetensors(states[0], _trl_metadata(4, states[0], {}, generation, encoding, "False")),
        )
        for step, number in ((5, 1), (6, 2), (7, 3)):
            changed = _changed(states[number - 1], states[number])
            tensors: dict[str, Tensor] = {}
            for name, (positions, values) in changed.items():
                first, second = ("indices", "values") if generation == 1 else ("idx", "val")
                tensors[f"{name}.{second}"] = _flat("BF16", values)
                tensors[f"{name}.{first}"] = _trl_positions(positions, encoding)
            metadata = _trl_metadata(step, states[number], changed, generation, encoding, "True")
            path = directory / "deltas" / f"step_{step:06d}.safetensors"
            _put(path, _safetensors(tensors, metadata))
        # An anchor of a step that is there as a delta too.
        _put(
            directory / "anchors" / "step_000006.safetensors",
            _safetensors(states[2], _trl_metadata(6, states[2], {}, generation, encoding, "False")),
        )
        return {"step_000004": 0, "step_000005": 1, "step_000006": 2, "step_000007": 3}

    return write


def _trl_positions(positions: NDArray[np.int64], encoding: str) -> Tensor:
    if encoding == "raw":
        return _flat("I32", positions.astype("<i4"))
    gaps = np.diff(positions, prepend=-1) - 1
    # Some tensors need the wide form; here one takes it by size, so that both are pinned.
    return _flat("U32", gaps.astype("<u4")) if gaps.size > 20 else _flat("U16", gaps.astype("<u2"))


def _trl_metadata(
    step: int, state: State, changed: Mapping[str, Any], generation: int, encoding: str, sparse: str
) -> dict[str, str]:
    elements = sum(positions.size for positions, _ in changed.values())
    total = sum(bits.size for _, _, bits in state.values())
    metadata = {
        "format": "sparse_weight_patch",
        "version": str(generation),
        "sparse": sparse,
        "model_version": str(step),
        "num_changed_params": str(len(changed)),
        "total_changed_elements": str(elements),
        "total_elements": str(total),
        "sparsity": str(1.0 - elements / total),
    }
    if generation == 1:
        return {**metadata, "changed_params": json.dumps(list(changed))}
    return {**metadata, "encoding": encoding}


def _grail(codec: str) -> Callable[[Path, list[State]], Mapping[str, int]]:
    def write(directory: Path, states: list[State]) -> Mapping[str, int]:
        _grail_full(directory, 100, states[0])
        for window, number in ((130, 1), (160, 2), (190, 3)):
            changed = _changed(states[number - 1], states[number])
            files = {
                "delta_sparse.bin.zst": _grail_payload(states[number], changed, codec),
                "delta_metadata.json": _grail_delta_metadata(
                    states[number], changed, codec, window
                ),
            }
            _grail_directory(directory, window, "DELTA", files, prev_window=window - 30)
        _grail_full(directory, 160, states[2])
        # Not ready: it must not be taken for a version.
        _put(directory / "checkpoint-220" / "DELTA" / "metadata.json", b"{")
        return {"100": 0, "130": 1, "160": 2, "190": 3}

    return write


def _grail_full(directory: Path, window: int, state: State) -> None:
    files = {"model.safetensors": _safetensors(state, {"format": "pt"}), "config.json": b'{"a": 1}'}
    _grail_directory(directory, window, "FULL", files, prev_window=None)


def _grail_directory(
    directory: Path, window: int, kind: str, files: Mapping[str, bytes], prev_window: int | None
) -> None:
    root = directory / f"checkpoint-{window}"
    for name, content in files.items():
        _put(root / kind / name, content)
    metadata = {
        "window": window,
        "parent_window": max(0, window - 30),
        "file_manifest": {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items()},
        "training_config": {"lr": 1e-6},
        "git_commit": "unknown",
        "created_at": 1767225600.5,
        "model_name": "async_trainer_snapshot",
        "checkpoint_type": kind,
        "prev_window": prev_window,
        "anchor_window": None if prev_window is None else 100,
        "weights_hash": "0" * 64,
        "env_id": "math",
        "env_params": {},
        "generation_params": {},
        "config_hash": "0" * 64,
    }
    _put(root / kind / "metadata.json", json.dumps(metadata, indent=2).encode())
    _put(root / kind / "manifest.sig", b"00" * 64)
    _put(root / kind / kind, b"")
    _put(root / f"READY-{window + 30}", b"")


def _grail_delta_metadata(
    state: State, changed: Mapping[str, Any], codec: str, window: int
) -> bytes:
    elements = sum(positions.size for positions, _ in changed.values())
    total = sum(bits.size for _, _, bits in state.values())
    document = {
        "format": f"sparse_codec_{codec}",
        "threshold": 0.0,
        "prev_window": window - 30,
        "anchor_window": 100,
        "shapes": {name: list(state[name][1]) for name in changed},
        "total_params": total,
        "nonzero_params": elements,
        "sparsity_ratio": 1.0 - elements / total,
    }
    return json.dumps(document, indent=2).encode()


def _grail_payload(state: State, changed: Mapping[str, Any], codec: str) -> bytes:
    rows = []
    data = b""
    for name, (positions, values) in sorted(changed.items()):
        dtype, shape, _ = state[name]
        row: dict[str, Any] = {
            "name": name,
            "shape": list(shape),
            "num_nonzero": positions.size,
            "value_dtype": _TORCH[dtype],
        }
        if codec == "v2":
            index = np.diff(positions, prepend=0).astype("<i4").tobytes()
        else:
            index, more = _grail_rows(positions, shape, is_narrow=codec == "v3.1")
            row |= more
        row |= {
            "indices_offset": len(data),
            "indices_size": len(index),
            "values_offset": len(data) + len(index),
            "values_size": values.nbytes,
        }
        data += index + values.tobytes()
        rows.append(row)
    version = {"v2": 2, "v3": 3, "v3.1": 31}[codec]
    header = json.dumps({"version": version, "tensors": rows}, separators=(",", ":")).encode()
    content = struct.pack("<I", len(header)) + header + data
    return zstandard.ZstdCompressor(level=1).compress(content)


def _grail_rows(
    positions: NDArray[np.int64], shape: tuple[int, ...], *, is_narrow: bool
) -> tuple[bytes, dict[str, Any]]:
    width = int(np.prod(shape[1:])) if len(shape) > 1 else 1
    row_steps, column_steps = [], []
    last_row = last_column = 0
    for number, position in enumerate(positions.tolist()):
        row, column = divmod(position, width)
        row_steps.append(row - last_row)
        begins = number == 0 or row != last_row
        column_steps.append(column if begins else column - last_column)
        last_row, last_column = row, column
    if not is_narrow:
        first, second = np.array(row_steps, "<i4"), np.array(column_steps, "<i4")
        more = {}
    else:
        first = np.array(row_steps, "<u1" if max(row_steps) < 256 else "<i4")
        second = np.array(column_steps, "<u2")
        more = {"row_dtype": first.dtype.name, "col_dtype": second.dtype.name}
    sizes = {"rows_size": first.nbytes, "cols_size": second.nbytes}
    return first.tobytes() + second.tobytes(), {**more, **sizes}


def _skyrl(directory: Path, states: list[State]) -> Mapping[str, int]:
    for version in (1, 2, 3):
        old, new = states[version - 1], states[version]
        records, payloads = [], [{}, {}]
        for number, name in enumerate(_changed(old, new)):
            dtype, shape, bits = new[name]
            frame = zstandard.ZstdCompressor(level=1).compress(_xor(old, new, name))
            payloads[number % 2][name] = _bytes(frame)
            records.append(
                {
                    "name": name,
                    "dtype": _TORCH[dtype],
                    "shape": list(shape),
                    "uncompressed_num_bytes": bits.nbytes,
                    "compressed_num_bytes": len(frame),
                    "payload_file": f"delta-rank00000-file{number % 2:06d}.safetensors",
                    "payload_key": name,
                    "checksum": xxhash.xxh3_128_hexdigest(bits.tobytes()),
                    "checksum_algorithm": "xxh3-128",
                }
            )
        files = sorted({str(record["payload_file"]) for record in records})
        manifest = {
            "version": version,
            "base_version": version - 1,
            "tensors": records,
            "total_uncompressed_num_bytes": sum(r["uncompressed_num_bytes"] for r in records),
            "total_compressed_num_bytes": sum(r["compressed_num_bytes"] for r in records),
            "payload_files": files,
        }
        root = directory / f"delta-{version:08d}"
        for number, file in enumerate(files):
            _put(root / file, _safetensors(payloads[number]))
        _put(root / "manifest.json", json.dumps(manifest).encode())
    return {"00000001": 1, "00000002": 2, "00000003": 3}


def _fireworks(arc: str) -> Callable[[Path, list[State]], Mapping[str, int]]:
    compress = zlib.compress if arc == "arc_v1" else zstandard.ZstdCompressor(level=3).compress

    def write(directory: Path, states: list[State]) -> Mapping[str, int]:
        halves = (list(states[0])[::2], list(states[0])[1::2])
        found = {}
        for number, identity in enumerate(("snap-8", "snap-9", "snap-10", "snap-11")):
            for part, held in enumerate(halves, 1):
                state, metadata = {name: states[number][name] for name in held}, {"format": "pt"}
                if number:
                    old = states[number - 1]
                    metadata = {
                        name: str(zlib.adler32(bits.tobytes()))
                        for name, (_, _, bits) in state.items()
                    }
                    state = {
                        name: _bytes(compress(_xor(old, states[number], name))) for name in held
                    }
                path = directory / identity / f"model-{part:05d}-of-00002.safetensors"
                _put(path, _safetensors(state, metadata))
            _put(directory / identity / "config.json", b'{"a": 1}')
            found[identity] = number
        return found

    return write
