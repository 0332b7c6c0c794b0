"""How small and how fast are byte planes (`full` anchors), beside zipnn and memcpy, on one thread?

The weights are BF16: those of a checkpoint that --weights names (rounded, where it holds wider floats), or else
16 Mi normally distributed ones, every row with a scale of its own. The bound is what the entropy of each plane, counted
afresh every 128 Ki units, allows a coder that sees no context. zipnn is measured where it is installed (extra `bench`).
All take turns; medians, best and worst of nine. Prints a table, or JSON with --json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from syncline import codecs, kernels
from syncline.kernels import _native
from syncline.types import WINDOW_UNITS, Bits, TensorMeta, Window

COUNT, ROWS = 1 << 24, 4096
ROUNDS = 9
ENTROPY_UNITS = 1 << 17
LEAST_UNITS = 1 << 10


def normal_weights() -> Bits:
    """Return rows of normal weights whose deviations are spread by a factor of about two."""
    rng = np.random.default_rng(0)
    scales = np.exp(rng.normal(-4, 0.3, (ROWS, 1))).astype(np.float32)
    weights = rng.standard_normal((ROWS, COUNT // ROWS), np.float32) * scales
    return ((weights.reshape(-1).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def checkpoint_weights(path: Path) -> Bits:
    """Return the weights of a safetensors file or a torch checkpoint, all but the smallest tensors."""
    import torch
    from safetensors.torch import load_file

    loaded = (
        load_file(path)
        if path.suffix == ".safetensors"
        else torch.load(path, map_location="cpu", weights_only=True)
    )
    tensors = loaded.get("model_state", loaded).values()
    flat = [
        tensor.detach().to(torch.bfloat16).reshape(-1).view(torch.int16).numpy().view(np.uint16)
        for tensor in tensors
        if tensor.is_floating_point() and tensor.numel() >= LEAST_UNITS
    ]
    return np.concatenate(flat)


def bound_bytes(weights: Bits) -> float:
    """Return the entropy of the planes, block by block."""
    total = 0.0
    for start in range(0, weights.size, ENTROPY_UNITS):
        for plane in kernels.split_planes(weights[start : start + ENTROPY_UNITS], rotated=True):
            counts = np.bincount(plane)
            counts = counts[counts > 0]
            total -= float((counts * np.log2(counts / plane.size)).sum())
    return total / 8


def windows(weights: Bits) -> Iterator[Window]:
    """Yield the windows of a full version, in which nothing is compared."""
    nothing, no_bits = np.empty(0, np.uint32), np.empty(0, np.uint16)
    for start in range(0, weights.size, WINDOW_UNITS):
        yield Window(start, weights[start : start + WINDOW_UNITS], nothing, no_bits, no_bits)


class Contender:
    """One coder: how large its output is, and the seconds that each way took.

    Args:
        encode: returns what is stored of the weights.
        decode: returns the weights' bits.
    """

    def __init__(self, encode: Callable[[], Any], decode: Callable[[Any], Bits]) -> None:
        self._encode, self._decode = encode, decode
        self.stored_bytes = 0
        self.encode_s: list[float] = []
        self.decode_s: list[float] = []

    def run(self, weights: Bits) -> None:
        """Code the weights once each way."""
        start_s = time.perf_counter()
        stored = self._encode()
        middle_s = time.perf_counter()
        back = self._decode(stored)
        self.decode_s.append(time.perf_counter() - middle_s)
        self.encode_s.append(middle_s - start_s)
        self.stored_bytes = memoryview(stored).nbytes
        if not np.array_equal(back, weights):
            raise SystemExit("the weights did not come back bit for bit")


def ours(weights: Bits) -> Contender:
    """Return `planes`, writing what it decodes into one array as an engine would."""
    meta = TensorMeta("w", "BF16", weights.shape)
    codec, held = codecs.get("planes"), np.zeros_like(weights)

    def decode(payload: bytes) -> Bits:
        for span in codec.decode(meta, payload, held):
            held[span.start : span.start + span.bits.size] = span.bits
        return held

    return Contender(lambda: b"".join(codec.encode(meta, windows(weights))), decode)


def zipnn(weights: Bits) -> Contender:
    """Return zipnn with its defaults for BF16, on one thread."""
    from zipnn import ZipNN

    coder = ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)
    # It reorders bits in the memory that it is given, so it gets a copy; that copy is not its fault.
    copies = [weights.tobytes() for _ in range(ROUNDS + 1)]
    return Contender(
        lambda: coder.compress(copies.pop()),
        lambda stored: np.frombuffer(coder.decompress(stored), np.uint16),
    )


def memcpy(weights: Bits) -> Contender:
    """Return the roof: a copy each way."""
    here, there = np.zeros_like(weights), np.zeros_like(weights)

    def copy(source: Bits, target: Bits) -> Bits:
        np.copyto(target, source)
        return target

    return Contender(lambda: copy(weights, here), lambda stored: copy(stored, there))


def measure(weights: Bits) -> dict[str, Any]:
    """Return every contender's figures."""
    contenders = {"memcpy": memcpy(weights), "planes": ours(weights)}
    if find_spec("zipnn"):
        contenders["zipnn"] = zipnn(weights)
    for turn in range(ROUNDS + 1):
        for contender in contenders.values():
            contender.run(weights)
            if turn == 0:  # memory is touched for the first time
                contender.encode_s.clear()
                contender.decode_s.clear()
    return {name: figures(found, weights.nbytes) for name, found in contenders.items()}


def figures(found: Contender, nbytes: int) -> dict[str, Any]:
    """Return ratio, and GB/s of weights each way."""
    speeds = {
        way: {
            "median": nbytes / statistics.median(times) / 1e9,
            "best": nbytes / min(times) / 1e9,
            "worst": nbytes / max(times) / 1e9,
        }
        for way, times in (("encode_gb_per_s", found.encode_s), ("decode_gb_per_s", found.decode_s))
    }
    return {"times_smaller": nbytes / found.stored_bytes, **speeds}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, help="a .safetensors file or a torch checkpoint")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    path = arguments.weights
    weights = normal_weights() if path is None else checkpoint_weights(path)
    others = [name for name in ("zipnn",) if find_spec(name) is not None]
    document = {
        **machine(*others),
        "isa": _native.selected_isa(),
        "weights": "normal" if path is None else path.name,
        "units": weights.size,
        "bound_times_smaller": weights.nbytes / bound_bytes(weights),
        "coders": measure(weights),
    }
    if arguments.json:
        print(json.dumps(document, indent=2))
        return
    print(f"{document['weights']}, {weights.size} units, {document['isa']}; {document['versions']}")
    print(f"bound without context: {document['bound_times_smaller']:.3f}x smaller")
    if not others:
        print("zipnn is not installed and not measured: pip install 'syncline[bench]'")
    print(f"{'':10}{'smaller':>10}{'encode GB/s':>16}{'decode GB/s':>16}   median (best)")
    for name, found in document["coders"].items():
        speeds = [found[f"{way}_gb_per_s"] for way in ("encode", "decode")]
        shown = [f"{speed['median']:.2f} ({speed['best']:.2f})" for speed in speeds]
        print(f"{name:10}{found['times_smaller']:>9.3f}x{shown[0]:>16}{shown[1]:>16}")


if __name__ == "__main__":
    main()
