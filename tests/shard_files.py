"""Real Megatron shards for tests: a small committed subset, and the whole set beside the checkout."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from syncline.layouts import Layout, MegatronMesh, megatron_layout, padded_rows
from syncline.types import Bits, TensorMeta, unsigned

_HERE = Path(__file__).resolve().parent
_SHARED = "shared/fixtures/megatron"


def fixture_roots() -> list[Path]:
    """The committed subset, and the whole set where it lies in a folder beside or above the checkout."""
    found = [_HERE / "data" / "megatron"]
    for folder in _HERE.parents:
        found += [path for path in (folder / _SHARED, folder.parent / _SHARED) if path.is_dir()][:1]
        if len(found) > 1:
            break
    return found


def read_safetensors(path: Path) -> dict[str, tuple[TensorMeta, Bits]]:
    """Read a safetensors file with nothing but the format's own rules."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        meta = TensorMeta(name, entry["dtype"], tuple(entry["shape"]))
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(raw[8 + length + begin : 8 + length + end], unsigned(meta.unit_bytes))
        found[name] = (meta, bits)
    return found


@dataclass(frozen=True)
class Case:
    """One family in one layout: its config, checkpoint, and the raw shards of every rank."""

    name: str
    config: dict[str, Any]
    checkpoint: dict[str, tuple[TensorMeta, Bits]]
    shards: list[dict[str, tuple[TensorMeta, Bits]]]
    mesh: MegatronMesh

    def layout(self) -> Layout:
        """The layout that tables, config and mesh give."""
        return megatron_layout(
            self.config,
            self.mesh,
            seen={name for shard in self.shards for name in shard},
            padded_vocab=padded_rows(self.found(0), self.mesh.tp),
            checkpoint=[meta for meta, _ in self.checkpoint.values()],
        )

    def found(self, rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of what a rank really has."""
        return {name: (meta.dtype, meta.shape) for name, (meta, _) in self.shards[rank].items()}

    def bits(self) -> dict[int, dict[str, Bits]]:
        """A writable copy of every rank's bits."""
        return {
            rank: {name: bits.copy() for name, (_, bits) in shard.items()}
            for rank, shard in enumerate(self.shards)
        }


def case_paths() -> list[Path]:
    """Every folder of raw shards."""
    return [
        path for root in fixture_roots() for path in sorted(root.glob("*/tp*")) if path.is_dir()
    ]


def read_case(path: Path) -> Case:
    """Read one folder of shards with the checkpoint beside it."""
    sizes = {key: int(size) for key, size in re.findall(r"([a-z]+)(\d+)", path.name)}
    files = sorted(path.glob("rank*.safetensors"), key=lambda file: int(file.stem[4:]))
    beside = path.parent / "huggingface"
    return Case(
        f"{path.parent.name}/{path.name}",
        json.loads((beside / "config.json").read_text()),
        read_safetensors(beside / "model.safetensors"),
        [read_safetensors(file) for file in files],
        MegatronMesh(len(files), **sizes),
    )
