"""What changed between two checkpoints: by kind of tensor, by exponent, by size of step, by distance.

Bits are BF16 and are compared as integers. Used by the scripts beside it and held to a plain count in
`tests/unit/test_pair_statistics.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from syncline.types import Bits

KINDS = {
    "embed_tokens": "embedding",
    "lm_head": "embedding",
    "norm": "norm",
    "experts": "expert",
    "gate.weight": "router",
    "q_proj": "attention q",
    "k_proj": "attention k",
    "v_proj": "attention v",
    "o_proj": "attention o",
    "gate_proj": "mlp gate",
    "up_proj": "mlp up",
    "down_proj": "mlp down",
}
"""Kind of tensor by a piece of its Hugging Face name; the first that fits counts."""

STEP_LIMITS = (1, 2, 4, 8, 16, 127)
"""Upper ends of the classes of steps in ulps; what is larger has a class of its own."""

BIAS = 127
GAP_LIMITS = (255, 65_535)


@dataclass(slots=True)
class PairStatistics:
    """Counts over all tensors that `add` was given.

    Attributes:
        elements, changed: in all.
        by_kind, by_exponent: elements and changed ones; the exponent is the base's, 0 for [1, 2).
        steps: changes that keep the sign, by the upper end of their class in `STEP_LIMITS`.
        sign_flips: changes that do not keep it.
        low_byte_only, high_byte_only: changes of one byte of the two.
        gaps_above: distances from one change to the next in the same tensor (the first one's from the
            tensor's begin) above each of `GAP_LIMITS`; `largest_gap` is the largest.
    """

    elements: int = 0
    changed: int = 0
    by_kind: dict[str, list[int]] = field(default_factory=dict)
    by_exponent: dict[int, list[int]] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    sign_flips: int = 0
    low_byte_only: int = 0
    high_byte_only: int = 0
    gaps_above: dict[int, int] = field(default_factory=lambda: dict.fromkeys(GAP_LIMITS, 0))
    largest_gap: int = 0

    @property
    def density(self) -> float:
        """Changed elements over all, 0 to 1."""
        return self.changed / self.elements if self.elements else 0.0

    def add(self, name: str, old: Bits, new: Bits) -> None:
        """Count one tensor: uint16 bits before and after, flat, of one length."""
        places = np.flatnonzero(old != new)
        before, after = old[places], new[places]
        self.elements += old.size
        self.changed += places.size
        _count(self.by_kind, kind_of(name), old.size, places.size)
        members = np.bincount(old >> 7 & 0xFF, minlength=256)
        moved = np.bincount(before >> 7 & 0xFF, minlength=256)
        for exponent in np.flatnonzero(members).tolist():
            _count(self.by_exponent, exponent - BIAS, int(members[exponent]), int(moved[exponent]))
        self._add_steps(before, after)
        gaps = np.diff(places, prepend=-1)
        for limit in GAP_LIMITS:
            self.gaps_above[limit] += int(np.count_nonzero(gaps > limit))
        if gaps.size:
            self.largest_gap = max(self.largest_gap, int(gaps.max()))

    def _add_steps(self, before: Bits, after: Bits) -> None:
        flips = before ^ after
        self.low_byte_only += int(np.count_nonzero(flips >> 8 == 0))
        self.high_byte_only += int(np.count_nonzero(flips & 0xFF == 0))
        is_flipped = flips >> 15 == 1
        self.sign_flips += int(np.count_nonzero(is_flipped))
        magnitudes = [(bits[~is_flipped] & 0x7FFF).astype(np.int64) for bits in (before, after)]
        sizes = np.abs(magnitudes[1] - magnitudes[0])
        for size_class, count in enumerate(np.bincount(np.searchsorted(STEP_LIMITS, sizes))):
            if count:
                self.steps[step_class(size_class)] += int(count)

    def as_json(self) -> dict[str, Any]:
        """Return the counts as JSON values, exponents ascending."""
        return {
            "elements": self.elements,
            "changed": self.changed,
            "density": self.density,
            "by_kind": self.by_kind,
            "by_exponent": {str(key): self.by_exponent[key] for key in sorted(self.by_exponent)},
            "steps": dict(self.steps),
            "sign_flips": self.sign_flips,
            "low_byte_only": self.low_byte_only,
            "high_byte_only": self.high_byte_only,
            "gaps_above": {str(limit): count for limit, count in self.gaps_above.items()},
            "largest_gap": self.largest_gap,
        }


def statistics(tensors: Iterable[tuple[str, Bits, Bits]]) -> PairStatistics:
    """Return the counts over tensors given as name, bits before, bits after."""
    found = PairStatistics()
    for name, old, new in tensors:
        found.add(name, old, new)
    return found


def kind_of(name: str) -> str:
    """Return the kind of a tensor, by its Hugging Face name.

    Example:
        >>> kind_of("model.layers.0.self_attn.q_proj.weight"), kind_of("model.norm.weight")
        ('attention q', 'norm')
    """
    return next((kind for piece, kind in KINDS.items() if piece in name), "other")


def step_class(index: int) -> str:
    """Return the name of a class of steps.

    Example:
        >>> step_class(0), step_class(2), step_class(len(STEP_LIMITS))
        ('1', '3-4', 'above 127')
    """
    if index == len(STEP_LIMITS):
        return f"above {STEP_LIMITS[-1]}"
    low = 1 if index == 0 else STEP_LIMITS[index - 1] + 1
    high = STEP_LIMITS[index]
    return str(high) if low == high else f"{low}-{high}"


def _count(counts: dict[Any, list[int]], key: object, elements: int, changed: int) -> None:
    entry = counts.setdefault(key, [0, 0])
    entry[0] += elements
    entry[1] += changed
