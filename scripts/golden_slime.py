"""Golden directories in the slime layout: a full version and a delta in every encoding and checksum."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from golden_payloads import windows_of
from golden_runs import Tensors, model_of, stepped

from syncline.format import checksum, part
from syncline.format.rules import INTERCHANGE_ENCODINGS
from syncline.interchange import slime_write
from syncline.stores import open_store
from syncline.types import TensorMeta, Window
from syncline.version import ForeignVersion

MODEL = (
    TensorMeta("embed", "BF16", (16, 10)),
    TensorMeta("head", "F32", (3, 5)),
    TensorMeta("norm", "F16", (6,)),
)
WINDOW_UNITS = 64


def write_slime(directory: Path) -> None:
    """Write `ENCODING-CHECKSUM/weight_v.../` for every pair, and what the versions hold."""
    old = model_of(*MODEL)
    new = stepped(old, "slime", 60)
    for number, tensors in enumerate((old, new), 1):
        metas = [meta for meta, _ in tensors.values()]
        data = b"".join(part.encode(metas, lambda name, at=tensors: [at[name][1].tobytes()]))
        (directory / f"expected-{number:06d}.safetensors").write_bytes(data)
    for encoding in INTERCHANGE_ENCODINGS:
        for name in checksum.NAMES:
            store = open_store(directory / f"{encoding}-{name}")
            full = ForeignVersion("slime", "000001", None, "full", "raw", name)
            slime_write.write(store, full, _windows(old, old), {"config.json": b"{}"})
            delta = ForeignVersion("slime", "000002", "000001", "delta", encoding, name)
            slime_write.write(store, delta, _windows(old, new), {})


def _windows(old: Tensors, new: Tensors) -> Iterator[tuple[TensorMeta, list[Window]]]:
    for name, (meta, bits) in sorted(new.items()):
        yield meta, list(windows_of(meta, np.copy(old[name][1]), bits, WINDOW_UNITS))
