"""How two checkpoints differ: density, steps in ulps, and what each encoding would cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from syncline import codecs, kernels
from syncline.abc import Observe
from syncline.errors import LayoutError
from syncline.sources import CheckpointSource
from syncline.sync.checks import listed
from syncline.types import WINDOW_UNITS, Bits, Step, TensorMeta

STEP_BINS = ("1", "2", "3-8", "9-127", ">127")
_STEP_EDGES = np.array([1, 2, 8, 127], np.uint64)


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs.

    Attributes:
        changed: units that differ.
        steps: how many of them moved by so many representable values, by bin of `STEP_BINS`.
        sign_flips: how many changed their highest bit; they are in no bin.
    """

    meta: TensorMeta
    changed: int
    steps: tuple[int, ...]
    sign_flips: int

    @property
    def density(self) -> float:
        """Share of units that differ."""
        return self.changed / self.meta.unit_count if self.meta.unit_count else 0.0


@dataclass(frozen=True)
class Comparison:
    """How two checkpoints differ, tensor by tensor and in all."""

    tensors: tuple[TensorDifference, ...]

    @property
    def changed(self) -> int:
        """Units that differ, over all tensors."""
        return sum(item.changed for item in self.tensors)

    @property
    def total(self) -> int:
        """Units of all tensors."""
        return sum(item.meta.unit_count for item in self.tensors)

    @property
    def full_bytes(self) -> int:
        """Bytes of the weights written out raw."""
        return sum(item.meta.nbytes for item in self.tensors)

    @property
    def density(self) -> float:
        """Share of units that differ."""
        return self.changed / self.total if self.total else 0.0

    @property
    def steps(self) -> Mapping[str, int]:
        """Changed units by size of their step; `sign flip` apart."""
        sums = [sum(column) for column in zip(*(i.steps for i in self.tensors), strict=True)]
        flips = sum(item.sign_flips for item in self.tensors)
        return {**dict(zip(STEP_BINS, sums, strict=True)), "sign flip": flips}

    def predicted_bytes(self) -> Mapping[str, int]:
        """Return the predicted payload for every encoding; `auto` takes the smallest per tensor."""
        names = codecs.NAMES
        sums = dict.fromkeys((*names, "auto"), 0)
        for item in self.tensors:
            if not item.changed:
                sums["full"] += item.meta.nbytes
                sums["planes"] += codecs.get("planes").predict_bytes(item.meta, 0)
                continue
            predicted = {
                name: codecs.get(name).predict_bytes(item.meta, item.changed) for name in names
            }
            for name, nbytes in predicted.items():
                sums[name] += nbytes
            sums["auto"] += min(predicted.values())
        return sums

    def recommendation(self) -> tuple[str, str]:
        """Return the encoding to take and one sentence that says why."""
        predicted = self.predicted_bytes()
        if not self.changed:
            return "auto", "nothing differs: a delta of any encoding is all but empty"
        ratio = self.full_bytes / max(1, predicted["auto"])
        if ratio < 2:
            return "full", (
                f"{self.density:.1%} of the elements differ, so a delta is only {ratio:.1f} times "
                "smaller than the weights and needs its base"
            )
        return "auto", (
            f"{self.density:.2%} of the elements differ: {ratio:.0f} times smaller than full; "
            f"overwrite, the choice for readers that may retry, would take "
            f"{predicted['overwrite'] / max(1, predicted['auto']):.1f} times as much"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        encoding, reason = self.recommendation()
        return {
            "changed": self.changed,
            "total": self.total,
            "density": self.density,
            "full_bytes": self.full_bytes,
            "steps": dict(self.steps),
            "predicted_bytes": dict(self.predicted_bytes()),
            "recommended": encoding,
            "reason": reason,
            "tensors": [{**asdict(item), "density": item.density} for item in self.tensors],
        }


def compare(old: CheckpointSource, new: CheckpointSource, observe: Observe) -> Comparison:
    """Compare two checkpoints bit by bit; reads each once, O(one window) of memory.

    Raises:
        LayoutError: names, dtypes or shapes differ; lists them.
    """
    before = old.metas()
    after = new.metas()
    faults = [f"only in {old.path}: {name}" for name in sorted(before.keys() - after.keys())]
    faults += [f"only in {new.path}: {name}" for name in sorted(after.keys() - before.keys())]
    faults += [
        f"{name}: {before[name].dtype} {list(before[name].shape)} against "
        f"{after[name].dtype} {list(after[name].shape)}"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name]
    ]
    if faults:
        raise LayoutError(f"the checkpoints do not hold the same tensors: {listed(faults)}")
    differences = []
    done_bytes, total_bytes = 0, sum(meta.nbytes for meta in after.values())
    for meta, bits in new.tensors():
        differences.append(_compare(meta, old.bits(meta.name), bits))
        done_bytes += meta.nbytes
        observe(Step("diff.tensor", done_bytes, total_bytes))
    return Comparison(tuple(differences))


def _compare(meta: TensorMeta, old: Bits, new: Bits) -> TensorDifference:
    changed = flips = 0
    steps = np.zeros(len(STEP_BINS), np.int64)
    for start in range(0, meta.unit_count, WINDOW_UNITS):
        window = slice(start, start + WINDOW_UNITS)
        offsets, old_bits, new_bits = kernels.diff(old[window], new[window])
        changed += offsets.size
        flipped = (old_bits ^ new_bits) >> (8 * meta.unit_bytes - 1) != 0
        flips += int(flipped.sum())
        low, high = np.minimum(old_bits, new_bits), np.maximum(old_bits, new_bits)
        sizes = (high - low)[~flipped].astype(np.uint64)
        steps += np.bincount(np.searchsorted(_STEP_EDGES, sizes), minlength=len(STEP_BINS))
    return TensorDifference(meta, changed, tuple(steps.tolist()), flips)
