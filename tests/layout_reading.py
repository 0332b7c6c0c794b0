"""Read whole chains of a foreign layout the plain way: state after state, in dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from syncline.abc import Interchange, Store
from syncline.errors import LayoutError
from syncline.sources import CheckpointSource
from syncline.types import Bits, Changes, TensorMeta
from syncline.version import ForeignVersion

Weights = dict[str, tuple[TensorMeta, Bits]]


def load(path: Path) -> Weights:
    """Return the tensors of a safetensors file."""
    return {meta.name: (meta, bits.copy()) for meta, bits in CheckpointSource(path).tensors()}


def apply(layout: Interchange, store: Store, version: ForeignVersion, base: Weights) -> Weights:
    """Return the weights after a version; those that it does not carry are the base's."""

    def lookup(name: str) -> tuple[TensorMeta, Bits]:
        if name not in base:
            raise LayoutError(f"no tensor {name!r}", tensor=name)
        return base[name]

    is_full = version.kind == "full"
    out = {} if is_full else {name: (meta, bits.copy()) for name, (meta, bits) in base.items()}
    for meta, pieces in layout.read(store, version, None if is_full else lookup):
        if is_full:
            out[meta.name] = (meta, np.zeros(meta.unit_count, f"<u{meta.unit_bytes}"))
        bits = out[meta.name][1]
        for piece in pieces:
            if isinstance(piece, Changes):
                bits[piece.start + piece.offsets.astype(np.int64)] = piece.bits
            else:
                bits[piece.start : piece.start + piece.bits.size] = piece.bits
    return out


def assert_same(found: Weights, wanted: Mapping[str, tuple[TensorMeta, Bits]]) -> None:
    """Check that two states are the same, bit for bit."""
    assert {name: meta for name, (meta, _) in found.items()} == {
        name: meta for name, (meta, _) in wanted.items()
    }
    for name, (_, bits) in wanted.items():
        assert found[name][1].tobytes() == bits.tobytes(), name
