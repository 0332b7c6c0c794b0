"""Make the committed subset of the real Megatron shards: `make_subset.py SHARED_FIXTURES`.

The layout is under test, not the dtype, so each F32 element is kept as one byte of its mantissa: a
quarter of the size, and a misplaced element still shows. Names, shapes and configs are as they were.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

KEPT = (
    "deepseek_v3_mtp/tp2_pp2_ep2_etp1_vpp1",
    "qwen2_tied/tp2_pp2_ep1_etp1_vpp1",
    "qwen3v/tp2_pp1_ep1_etp1_vpp1",
)


def shrink(source: Path, target: Path) -> None:
    """Rewrite a safetensors file of F32 tensors with one byte of each element."""
    raw = source.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    small, parts, place = {}, [], 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        data = np.frombuffer(raw[8 + length + begin : 8 + length + end], np.uint8)[1::4].tobytes()
        offsets = [place, place + len(data)]
        small[name] = {"dtype": "U8", "shape": entry["shape"], "data_offsets": offsets}
        parts.append(data)
        place += len(data)
    text = json.dumps(small, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def main(shared: Path) -> None:
    """Write the subset beside this script."""
    here = Path(__file__).resolve().parent / "megatron"
    for kept in KEPT:
        family = Path(kept).parent
        for file in [
            *(shared / kept).glob("*.safetensors"),
            shared / family / "huggingface/model.safetensors",
        ]:
            shrink(file, here / file.relative_to(shared))
        shutil.copy(shared / family / "huggingface/config.json", here / family / "huggingface")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
