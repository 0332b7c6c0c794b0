"""The slime layout once more, written and read without Syncline: what its own tools do, in numpy.

Weights are plain arrays by name. Digests and positions are as in `docs/reference/slime.md`.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import blake3
import numpy as np
import xxhash
import zstandard
from safetensors.numpy import load_file, save_file

from syncline import MemoryEngine
from syncline.stores import FilesystemStore, open_store
from syncline.types import TensorMeta

CHECKSUMS = {
    "xxh3-128": xxhash.xxh3_128_hexdigest,
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}
COMBINATIONS = [(encoding, name) for encoding in ("xor", "overwrite") for name in CHECKSUMS]
INDEX = "model.safetensors.index.json"

Weights = dict[str, np.ndarray]


def raw(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def payload(old: np.ndarray, new: np.ndarray, encoding: str) -> np.ndarray:
    before, after = raw(old), raw(new)
    if encoding == "xor":
        content = (before ^ after).tobytes()
    else:
        places = np.flatnonzero(before != after).astype("<u4")
        content = np.uint32(places.size).tobytes() + places.tobytes() + after[places].tobytes()
    return np.frombuffer(zstandard.ZstdCompressor(level=1).compress(content), np.uint8)


def write_delta(
    run: Path,
    version: str,
    base: str,
    old: Weights,
    new: Weights,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    *,
    parts: int = 1,
    first: int = 0,
    directory: str | None = None,
) -> Path:
    target = run / (f"weight_v{version}" if directory is None else directory)
    target.mkdir(parents=True)
    changed = sorted(name for name in new if (raw(old[name]) != raw(new[name])).any())
    weight_map = {}
    count = min(parts, len(changed))
    for number in range(count):
        names = changed[number::count]
        path = f"model-{number + first:05d}-of-{count:05d}.safetensors"
        save_file(
            {name: payload(old[name], new[name], encoding) for name in names},
            target / path,
            {name: CHECKSUMS[checksum](raw(new[name]).tobytes()) for name in names},
        )
        weight_map |= dict.fromkeys(names, path)
    write_index(
        target,
        {
            "version": version,
            "base_version": base,
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": checksum,
        },
        weight_map,
    )
    return target


def write_full(
    run: Path, directory: str, weights: Weights, checksum: str | None = None, *, first: int = 1
) -> Path:
    target = run / directory
    target.mkdir(parents=True)
    names = sorted(weights)
    weight_map = {}
    for number, group in enumerate((names[::2], names[1::2])):
        path = f"model-{number + first:05d}-of-00002.safetensors"
        digests = {"format": "pt"}
        if checksum is not None:
            digests |= {name: CHECKSUMS[checksum](raw(weights[name]).tobytes()) for name in group}
        save_file({name: weights[name] for name in group}, target / path, digests)
        weight_map |= dict.fromkeys(group, path)
    metadata = {"total_size": sum(array.nbytes for array in weights.values())}
    if checksum is not None:
        metadata["checksum_format"] = checksum
    write_index(target, metadata, weight_map)
    (target / "config.json").write_text('{"model_type": "oracle"}')
    return target


def write_index(target: Path, metadata: dict, weight_map: dict) -> None:
    (target / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def edit_index(target: Path, **fields: object) -> None:
    """Set members of an index's metadata; None removes one."""
    document = json.loads((target / INDEX).read_text())
    for key, value in fields.items():
        document["metadata"][key] = value
        if value is None:
            del document["metadata"][key]
    (target / INDEX).write_text(json.dumps(document))


def edit_header(path: Path, edit) -> None:
    """Rewrite a safetensors header as `edit` changes it; the data stay."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def apply_delta(target: Path, weights: Weights) -> Weights:
    """Return the weights after a delta, as slime's reader does it: every file that it finds, then digests."""
    metadata = json.loads((target / INDEX).read_text())["metadata"]
    out = {name: array.copy() for name, array in weights.items()}
    for path in sorted(target.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        digests = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        for name, tensor in load_file(path).items():
            content = zstandard.ZstdDecompressor().decompress(tensor.tobytes())
            bits = out[name].reshape(-1).view(np.uint8)
            if metadata["delta_encoding"] == "xor":
                bits ^= np.frombuffer(content, np.uint8)
            else:
                count = int.from_bytes(content[:4], "little")
                places = np.frombuffer(content, "<u4", count, 4)
                bits[places] = np.frombuffer(content, np.uint8, count, 4 + 4 * count)
            assert digests[name] == CHECKSUMS[metadata["checksum_format"]](bits.tobytes())
    return out


def model(rng: np.random.Generator, dtype: type = np.float32) -> Weights:
    return {
        "embed.weight": rng.standard_normal((40, 16)).astype(dtype),
        "layers.0.w": rng.standard_normal((33, 7)).astype(dtype),
        "layers.1.w": rng.standard_normal(1000).astype(np.float16),
        "norm": rng.integers(0, 255, 5, np.uint8),
    }


def stepped(weights: Weights, rng: np.random.Generator, share: float = 0.05) -> Weights:
    """Return weights of which a share of the elements has other bits; the last tensor stays."""
    out = {name: array.copy() for name, array in weights.items()}
    for name in sorted(weights)[:-1]:
        flat = out[name].reshape(-1).view(f"u{out[name].itemsize}")
        places = rng.random(flat.size) < share
        places[rng.integers(flat.size)] = True
        flat[places] ^= flat.dtype.type(1)
    return out


def reader(run: Path) -> FilesystemStore:
    store = open_store(run)
    assert isinstance(store, FilesystemStore)
    return store


def write_chain(run, states, encoding="xor", checksum="xxh3-128", **options) -> None:
    for number in range(1, len(states)):
        write_delta(
            run,
            f"{number:06d}",
            f"{number - 1:06d}",
            states[number - 1],
            states[number],
            encoding,
            checksum,
            **options,
        )


_DTYPES = {"float32": "F32", "float16": "F16", "uint8": "U8"}


def engine_of(weights) -> MemoryEngine:
    return MemoryEngine(
        {
            name: (TensorMeta(name, _DTYPES[array.dtype.name], array.shape), array)
            for name, array in weights.items()
        }
    )


def assert_holds(engine, weights) -> None:
    assert set(engine.tensors()) == set(weights)
    for name, array in weights.items():
        assert engine.view(name).tobytes() == raw(array).tobytes(), name
