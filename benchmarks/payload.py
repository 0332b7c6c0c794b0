"""How many bytes does a changed element cost, everything included, in every encoding and in others' layouts?

python benchmarks/payload.py PAIRS... [--case-c] [--json FILE]

PAIRS are directories that `make_pairs.py` wrote. For every encoding the pair is published as a version
after a full one, taken by an engine and compared bit for bit; what is counted is the whole version directory:
parts with their headers, index, table and manifest. The layouts of others are re-implementations
(`rival_layouts.py`) without headers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import case_c
import numpy as np
import rival_layouts
from machine import machine
from make_pairs import PAIRS

from syncline import (
    CheckpointSource,
    MemoryEngine,
    MemoryStore,
    Publisher,
    Receiver,
    codecs,
)
from syncline.abc import WeightSource
from syncline.types import Bits, TensorMeta

DENSITIES = (0.003, 0.01, 0.03, 0.05, 0.10)


class Listed(WeightSource):
    """Weights given as a list of metas and bits."""

    def __init__(self, tensors: Iterable[tuple[TensorMeta, Bits]]) -> None:
        self._tensors = list(tensors)

    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        """Yield them."""
        yield from self._tensors


def version_bytes(store: MemoryStore, version: int) -> dict[str, int]:
    """Return the size of every object of a version, by its name in the directory."""
    prefix = f"weight_v{version:06}/"
    return {info.key.removeprefix(prefix): info.size_bytes for info in store.list(prefix)}


def encode(encoding: str, old: WeightSource, new: WeightSource) -> dict[str, int]:
    """Publish `new` on `old` and take it over; return the sizes of what was published.

    Raises:
        SystemExit: the engine does not hold the bits of `new`.
    """
    store, engine = MemoryStore(), MemoryEngine()
    publisher = Publisher(store, encoding=encoding, anchor_every=None)
    publisher.publish(old)
    receiver = Receiver(store, engine)
    receiver.sync()
    published = publisher.publish(new)
    receiver.sync()
    for meta, bits in new.tensors():
        if not np.array_equal(engine.view(meta.name), bits):
            raise SystemExit(f"{encoding}: {meta.name} differs")
    return version_bytes(store, published.version)


def measure(old: WeightSource, new: WeightSource, encodings: Iterable[str]) -> dict[str, Any]:
    """Return sizes of one pair, in bytes, and bytes for each changed element."""
    after = {meta.name: bits for meta, bits in new.tensors()}
    pairs = [(bits, after[meta.name]) for meta, bits in old.tensors()]
    full_bytes = sum(bits.nbytes for bits in after.values())
    moved = [pair for pair in pairs if not np.array_equal(*pair)]
    changed = sum(int(np.count_nonzero(before != bits)) for before, bits in moved)
    objects = {encoding: encode(encoding, old, new) for encoding in encodings}
    sizes = {encoding: sum(found.values()) for encoding, found in objects.items()}
    others = {name: layout(moved) for name, layout in rival_layouts.LAYOUTS.items()}
    bounds = {
        "uniform": rival_layouts.uniform_bound_bytes(moved),
        "given exponent": rival_layouts.exponent_bound_bytes(moved),
    }
    return {
        "elements": full_bytes // 2,
        "changed": changed,
        "density": changed / (full_bytes // 2),
        "tensors": len(pairs),
        "changed_tensors": len(moved),
        "full_bytes": full_bytes,
        "bytes": sizes,
        "objects": objects,
        "per_change": {name: size / changed for name, size in sizes.items()},
        "times_smaller": {name: full_bytes / size for name, size in sizes.items()},
        "others_per_change": {name: size / changed for name, size in others.items()},
        "bound_per_change": {name: size / changed for name, size in bounds.items()},
        "payload_per_change": {
            name: sum(size for part, size in found.items() if part.endswith(".safetensors"))
            / changed
            for name, found in objects.items()
        },
    }


def of_directory(
    directory: Path,
) -> Iterator[tuple[str, dict[str, Any], WeightSource, WeightSource]]:
    """Yield title, description and both checkpoints of every pair that was made in a directory."""
    for pair in json.loads((directory / PAIRS).read_text())["pairs"]:
        kind = ("first" if pair["is_first"] else "later") + " warm" * pair["is_warm"]
        title = f"lr {pair['rate']:g}, {pair['steps_apart']} apart, {kind}"
        old, new = (CheckpointSource(directory / pair[side]) for side in ("old", "new"))
        yield title, pair, old, new


def of_case_c() -> Iterator[tuple[str, dict[str, Any], WeightSource, WeightSource]]:
    """Yield case C at every density."""
    for density in DENSITIES:
        made = list(case_c.tensors(density))
        old = Listed((meta, before) for meta, before, _ in made)
        new = Listed((meta, after) for meta, _, after in made)
        yield f"case C, {density:.1%}", {"case_c": density}, old, new


def row(title: str, found: dict[str, Any]) -> str:
    """Return the lines that are printed about one pair."""
    per_change = ", ".join(f"{name} {size:.3f}" for name, size in found["per_change"].items())
    others = ", ".join(f"{name} {size:.2f}" for name, size in found["others_per_change"].items())
    bounds = ", ".join(f"{name} {size:.3f}" for name, size in found["bound_per_change"].items())
    times = ", ".join(f"{name} {size:.1f}" for name, size in found["times_smaller"].items())
    return (
        f"{title}: {found['density']:.3%} of {found['elements']:,}\n  bytes per change, all "
        f"included: {per_change}\n  others, without headers: {others}\n  bounds: {bounds}\n"
        f"  times smaller: {times}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", type=Path, nargs="*", help="directories with pairs.json")
    parser.add_argument("--case-c", action="store_true", help="also case C at five densities")
    parser.add_argument("--later", action="store_true", help="leave out pairs from the start")
    parser.add_argument("--encodings", nargs="+", default=codecs.NAMES, choices=codecs.NAMES)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    measured_on = machine()
    cases = [
        case
        for directory in arguments.pairs
        for case in of_directory(directory)
        if not (arguments.later and case[1]["is_first"])
    ]
    results = []
    for title, about, old, new in chain(cases, of_case_c() if arguments.case_c else ()):
        found = measure(old, new, arguments.encodings)
        print(row(title, found), flush=True)
        results.append({"title": title} | about | found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**measured_on, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
