"""Versions of a small model with one tensor of every dtype, and engines that hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from syncline import kernels
from syncline.abc import Engine
from syncline.arrays import NUMPY_NAMES
from syncline.engines import CheckpointDir, MemoryEngine, TorchModule
from syncline.engines.learned import LearnedEngine, learn
from syncline.types import DTYPE_BITS, ZERO, Bits, Fingerprint, Record, Span, TensorMeta, unsigned
from syncline.version import HeldVersion, Manifest, PartEntry, TensorEntry

Weights = dict[str, Bits]

METAS = {
    meta.name: meta
    for meta in [
        *(TensorMeta(f"layer.{dtype}", dtype, (6, 8)) for dtype in sorted(DTYPE_BITS)),
        TensorMeta("layer.BF16.scalar", "BF16", ()),
        TensorMeta("layer.F32.scalar", "F32", ()),
        TensorMeta("layer.empty", "BF16", (0, 4)),
        TensorMeta("layer", "F32", (3, 5, 7)),
        TensorMeta("layer.long", "BF16", (300, 700)),
    ]
}

FILES = {"config.json": b'{"model_type": "none"}', "tokenizer.json": b"{}", "LICENSE": b"free"}


def draw(seed: int) -> Weights:
    """Random bits for every tensor: NaN payloads and -0.0 are among them."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 256, meta.nbytes, np.uint8).view(unsigned(meta.unit_bytes))
        for name, meta in METAS.items()
    }


def change(weights: Weights, seed: int, *, share: float = 0.02) -> Weights:
    """A later version: some units of most tensors differ; `layer.F16` never does."""
    rng = np.random.default_rng(seed)
    changed = {name: bits.copy() for name, bits in weights.items()}
    for name, bits in changed.items():
        if bits.size and name != "layer.F16":
            count = max(1, int(bits.size * share))
            where = rng.choice(bits.size, count, replace=False)
            bits[where] ^= bits.dtype.type(1 << rng.integers(0, 8 * bits.itemsize))
    return changed


def version_of(number: int, weights: Weights) -> HeldVersion:
    """A full version with these weights. Engines look at names, dtypes, shapes and the number alone."""
    table = tuple(
        TensorEntry(
            METAS[name],
            Fingerprint.from_hex(hashlib.sha256(bits.tobytes()).hexdigest()[:32]),
            encoding="full",
            part=0,
            changed=None,
        )
        for name, bits in sorted(weights.items())
    )
    total = sum((entry.fingerprint for entry in table), ZERO)
    manifest = Manifest(
        run_id="0" * 32,
        epoch=1,
        version=number,
        kind="full",
        base_version=None,
        base_sha256=None,
        encoding="auto",
        parts=(PartEntry("model-00000-of-00001.safetensors", 1 << 40, "0" * 64),),
        files=(),
        tensors=table,
        fingerprint_before=None,
        fingerprint=total,
    )
    return HeldVersion(manifest, hashlib.sha256(total.hex().encode()).hexdigest())


def records(old: Weights, new: Weights, *, window_units: int = 40_000) -> Iterator[Record]:
    """What turns `old` into `new`: sparse records, dense where most of a window differs."""
    for name in sorted(new):
        for start in range(0, new[name].size, window_units):
            window = slice(start, start + window_units)
            offsets, old_bits, new_bits = kernels.diff(old[name][window], new[name][window])
            if offsets.size > new[name][window].size // 2:
                yield Record(name, start, None, old[name][window], new[name][window])
            elif offsets.size:
                yield Record(name, start, offsets, old_bits, new_bits)


def spans(
    weights: Weights, *, window_units: int = 40_000
) -> Iterator[tuple[TensorMeta, Iterator[Span]]]:
    for name in sorted(weights, reverse=True):
        yield METAS[name], windows(weights[name], window_units)


def windows(bits: Bits, window_units: int) -> Iterator[Span]:
    for start in range(0, bits.size, window_units):
        yield Span(start, bits[start : start + window_units])


def held_bits(engine: Engine) -> dict[str, bytes]:
    """What the engine holds, bit for bit."""
    return {name: engine.view(name).tobytes() for name in engine.tensors()}


def as_bytes(weights: Weights) -> dict[str, bytes]:
    return {name: bits.tobytes() for name, bits in weights.items()}


@dataclass(frozen=True)
class Case:
    """One kind of engine.

    Attributes:
        make: an engine that holds these weights as this version.
        empty: an engine that holds nothing; None if there is no such thing.
        reopen: another engine over the same weights, as after a restart; None if they die with it.
        dtypes: of the tensors that it can hold.
        is_pretending: its tensors are in host memory, and taken for tensors on a GPU.
    """

    make: Callable[[Path, Weights, HeldVersion], Engine]
    empty: Callable[[Path], Engine] | None
    reopen: Callable[[Path], Engine] | None = None
    dtypes: frozenset[str] = frozenset(DTYPE_BITS)
    is_pretending: bool = False

    def weights(self, weights: Weights) -> Weights:
        return {name: bits for name, bits in weights.items() if METAS[name].dtype in self.dtypes}


def filled(engine: Engine, weights: Weights, version: HeldVersion) -> Engine:
    engine.create(version, spans(weights), FILES)
    return engine


def torch_engine(path: Path, weights: Weights, version: HeldVersion) -> Engine:
    return module_engine(weights, version, strided=False)


def strided_engine(path: Path, weights: Weights, version: HeldVersion) -> Engine:
    return module_engine(weights, version, strided=True)


def cuda_engine(path: Path, weights: Weights, version: HeldVersion) -> Engine:
    return module_engine(weights, version, strided=False, device="cuda")


def module_engine(
    weights: Weights, version: HeldVersion, *, strided: bool, device: str = "cpu"
) -> Engine:
    import torch

    module = torch.nn.Module()
    names = {}
    for number, (name, bits) in enumerate(weights.items()):
        meta = METAS[name]
        tensor = torch.empty(meta.shape, dtype=getattr(torch, TORCH_DTYPES[meta.dtype]))
        if bits.size:
            raw = torch.from_numpy(bits.view(np.uint8).copy())
            tensor = raw.view(tensor.dtype).reshape(meta.shape)
        if strided and tensor.ndim > 1:
            backwards = torch.empty(meta.shape[::-1], dtype=tensor.dtype)
            backwards = backwards.permute(*reversed(range(tensor.ndim)))
            integer = getattr(torch, f"int{8 * tensor.element_size()}")
            backwards.view(integer).copy_(tensor.view(integer))
            tensor = backwards
        module.register_buffer(f"buffer{number}", tensor.to(device))
        names[f"buffer{number}"] = name
    engine = TorchModule(module, names)
    engine.apply((), version)
    return engine


def learned_engine(path: Path, weights: Weights, version: HeldVersion) -> Engine:
    return worker_engine(weights, version, ways=1)


def half_engine(path: Path, weights: Weights, version: HeldVersion) -> Engine:
    return worker_engine(weights, version, ways=2)


def worker_engine(weights: Weights, version: HeldVersion, *, ways: int) -> Engine:
    """A worker that holds the last of `ways` cuts of every tensor, transposed if it is cut."""
    import torch

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if ways == 1 or tensor.ndim == 0 or tensor.shape[0] % ways:
            return tensor
        rows = tensor.shape[0] // ways
        return tensor[(ways - 1) * rows :].transpose(0, -1)

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            live[name].copy_(cut(tensor))

    checkpoint = {name: as_torch(METAS[name], bits) for name, bits in weights.items()}
    live = {name: torch.zeros_like(cut(tensor)).contiguous() for name, tensor in checkpoint.items()}
    load(checkpoint.items())
    learned = learn(load, [METAS[name] for name in weights], live)
    engine = LearnedEngine(learned, live, lambda name: (METAS[name], weights[name]))
    engine.apply((), version)
    return engine


def as_torch(meta: TensorMeta, bits: Bits) -> Any:
    import torch

    dtype = getattr(torch, TORCH_DTYPES[meta.dtype])
    if not bits.size:
        return torch.empty(meta.shape, dtype=dtype)
    return torch.from_numpy(bits.view(np.uint8).copy()).view(dtype).reshape(meta.shape)


TORCH_DTYPES = {canonical: name for name, canonical in NUMPY_NAMES.items()}

CASES = {
    "memory": Case(
        make=lambda path, weights, version: filled(MemoryEngine(), weights, version),
        empty=lambda path: MemoryEngine(),
    ),
    "torch": Case(make=torch_engine, empty=None, dtypes=frozenset(TORCH_DTYPES)),
    "torch_pretending": Case(
        make=torch_engine, empty=None, dtypes=frozenset(TORCH_DTYPES), is_pretending=True
    ),
    "torch_cuda": Case(make=cuda_engine, empty=None, dtypes=frozenset(TORCH_DTYPES)),
    # A loader's copy makes 1 of every byte of a bool that is not 0, so random bytes cannot be loaded.
    "learned": Case(make=learned_engine, empty=None, dtypes=frozenset(TORCH_DTYPES) - {"BOOL"}),
    "learned_half": Case(make=half_engine, empty=None, dtypes=frozenset(TORCH_DTYPES) - {"BOOL"}),
    "torch_strided": Case(make=strided_engine, empty=None, dtypes=frozenset(TORCH_DTYPES)),
    "in_place": Case(
        make=lambda path, weights, version: filled(CheckpointDir(path / "m"), weights, version),
        empty=lambda path: CheckpointDir(path / "m"),
        reopen=lambda path: CheckpointDir(path / "m"),
    ),
    "in_place_shards": Case(
        make=lambda path, weights, version: filled(
            CheckpointDir(path / "m", shard_bytes=4000), weights, version
        ),
        empty=lambda path: CheckpointDir(path / "m", shard_bytes=4000),
        reopen=lambda path: CheckpointDir(path / "m"),
    ),
    "swap": Case(
        make=lambda path, weights, version: filled(
            CheckpointDir(path / "m", mode="swap", shard_bytes=4000), weights, version
        ),
        empty=lambda path: CheckpointDir(path / "m", mode="swap", shard_bytes=4000),
        reopen=lambda path: CheckpointDir(path / "m", mode="swap"),
    ),
}
