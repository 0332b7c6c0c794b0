"""What every weight source promises, over every source there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from syncline.abc import WeightSource
from syncline.format import part
from syncline.sources import CheckpointSource, MemorySource
from syncline.types import DTYPE_BITS, TensorMeta, unsigned

torch = pytest.importorskip("torch")
Expected = dict[str, tuple[TensorMeta, bytes]]

FILES = {"config.json": b"{}", "tokenizer.model": b"\x0a\x09"}


def save(tensors: dict[str, Any], path: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_file(tensors, path)


def numpy_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "layer.weight": rng.standard_normal((4, 6)).astype(ml_dtypes.bfloat16),
        "layer": rng.standard_normal((3, 5)).astype(np.float32).T,
        "layer.scale": np.array(-0.0, np.float64),
        "layer.empty": np.empty((0, 4), np.int8),
        "layer.fp8": rng.integers(0, 256, 9, np.uint8).view(ml_dtypes.float8_e4m3fn),
        "layer.mask": np.array([True, False, True]),
    }


def torch_weights() -> dict[str, Any]:
    return {
        "layer.weight": torch.randn(4, 6, generator=torch.Generator().manual_seed(5)).bfloat16(),
        "layer": torch.arange(15.0).reshape(3, 5).T,
        "layer.scale": torch.tensor(float("nan"), dtype=torch.float64),
        "layer.empty": torch.empty(0, 4, dtype=torch.int8),
        "layer.fp8": torch.arange(9, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "layer.mask": torch.tensor([True, False, True]),
    }


def expected_numpy() -> Expected:
    dtypes = ("BF16", "F32", "F64", "I8", "F8_E4M3", "BOOL")
    return {
        name: (TensorMeta(name, dtype, array.shape), array.tobytes())
        for (name, array), dtype in zip(numpy_weights().items(), dtypes, strict=True)
    }


def expected_torch() -> Expected:
    dtypes = ("BF16", "F32", "F64", "I8", "F8_E4M3", "BOOL")
    return {
        name: (
            TensorMeta(name, dtype, tuple(tensor.shape)),
            tensor.contiguous().view(torch.uint8).numpy().tobytes()
            if tensor.ndim and tensor.numel()
            else tensor.numpy().tobytes(),
        )
        for (name, tensor), dtype in zip(torch_weights().items(), dtypes, strict=True)
    }


def every_dtype() -> Expected:
    rng = np.random.default_rng(6)
    metas = [TensorMeta(f"t.{dtype}", dtype, (4, 2)) for dtype in sorted(DTYPE_BITS)]
    return {
        meta.name: (meta, rng.integers(0, 256, meta.nbytes, np.uint8).tobytes()) for meta in metas
    }


def written_file(path: Path) -> WeightSource:
    expected = every_dtype()
    chunks = part.encode(
        [meta for meta, _ in expected.values()], lambda name: [expected[name][1]], {"format": "pt"}
    )
    (path / "any-name.safetensors").write_bytes(b"".join(chunks))
    return CheckpointSource(path / "any-name.safetensors")


def single_directory(path: Path) -> WeightSource:
    tensors = {name: tensor.contiguous() for name, tensor in torch_weights().items()}
    save(tensors, path / "model.safetensors")
    write_files(path)
    return CheckpointSource(path)


def indexed_directory(path: Path) -> WeightSource:
    hub = pytest.importorskip("huggingface_hub")
    tensors = {name: tensor.contiguous() for name, tensor in torch_weights().items()}
    hub.save_torch_state_dict(tensors, path, max_shard_size=50)
    assert (path / "model.safetensors.index.json").exists()
    write_files(path)
    return CheckpointSource(path)


def write_files(path: Path) -> None:
    for name, content in FILES.items():
        (path / name).write_bytes(content)


CASES: dict[str, tuple[Callable[[Path], WeightSource], Expected, dict[str, bytes]]] = {
    "numpy": (lambda path: MemorySource(numpy_weights(), FILES), expected_numpy(), FILES),
    "torch": (lambda path: MemorySource(torch_weights()), expected_torch(), {}),
    "pairs": (lambda path: MemorySource(list(torch_weights().items())), expected_torch(), {}),
    "file": (written_file, every_dtype(), {}),
    "directory": (single_directory, expected_torch(), FILES),
    "index": (indexed_directory, expected_torch(), FILES),
}


@pytest.mark.parametrize("kind", sorted(CASES))
def test_every_tensor_comes_once_with_its_bits(kind: str, tmp_path: Path) -> None:
    make, expected, files = CASES[kind]
    source = make(tmp_path)
    for _ in range(2):
        found = {}
        for meta, bits in source.tensors():
            assert meta.name not in found
            assert bits.dtype == unsigned(meta.unit_bytes)
            assert bits.shape == (meta.unit_count,)
            found[meta.name] = (meta, bits.tobytes())
        assert found == expected
        assert dict(source.files()) == files
