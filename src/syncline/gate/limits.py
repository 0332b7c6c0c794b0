"""What difference is still that of two programs computing the same: learned where the weights are proven.

Trainer and engine run different kernels on the same bits, so their log-probabilities differ by rounding,
by how much depends on model, dtype and kernels, and only a measurement tells. The first version is the
measurement: the fingerprints of what the engine holds are those of the manifest, so whatever difference
there is, the weights are not its cause.

**From one version to all later ones.** With n scored tokens the largest difference of one version is about
the 1 - 1/n quantile; over m versions it is the 1 - 1/(nm) quantile. If tails fall no slower than
exponentially the second is at most ln(nm) / ln(n) times the first: 2.7 times for n = 64 and m = 1,000, 3.2
times for m = 10,000. BF16 has heavier tails, because improbable tokens have large negative logits and those are
rounded coarsely; six times what was seen is chosen to cover both. The mean of n differences spreads less, and the
divergence, which is quadratic in a difference of logits, by the square of that: their margins
are for this, and for what really changes in training, where logits grow and rounding with them.
Below the floors is what FP32 arithmetic alone does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from syncline.errors import FormatError
from syncline.format.strict_json import document, dump, number
from syncline.gate.deviation import Deviation

MARGINS: Mapping[str, float] = MappingProxyType(
    {"max_difference": 6.0, "mean_difference": 3.0, "kl": 9.0}
)
"""How many times what was seen on proven weights is still taken for rounding."""

FLOOR = 5e-5
"""Nats that FP32 alone can differ by; no limit on a difference is below it."""
DIVERGENCE_FLOOR = 5e-6
"""The same for the divergence, most of which is the rounding of `deviation.REST`."""

USELESS = 0.5
"""A mean difference, in nats, from which on no limit is learned: it would let through what it is for."""

_FORMAT = "syncline-gate-limits"
_NAMES = ("max_difference", "mean_difference", "kl")
FIGURES = (*zip(_NAMES, _NAMES, strict=True), ("resumed_difference", "max_difference"))
"""Each figure of a deviation, and the limit that it is held against."""
_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Above any of these, in nats, a version is flagged; each is for the figure of its name in `Deviation`.

    `resumed_difference` is held against `max_difference`: an engine computes the same with its cache.

    Example:
        >>> Limits(0.5, 0.1, 0.01).exceeded(Deviation(64, 0, 0.2, 0.3, 0.001, None, 0, 3))
        ('mean_difference 0.3 is above 0.1',)
    """

    max_difference: float
    mean_difference: float
    kl: float

    def exceeded(self, found: Deviation) -> tuple[str, ...]:
        """Return what lies above a limit, or is no number at all; nothing if the version is within."""
        over = []
        if found.not_finite:
            over.append(f"{found.not_finite} of {found.positions} scores are NaN or infinite")
        for name, against in FIGURES:
            value, limit = getattr(found, name), getattr(self, against)
            if value is not None and not value <= limit:
                over.append(f"{name} {value:.3g} is above {limit:.3g}")
        return tuple(over)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def dump(self) -> bytes:
        """Return the limits as a JSON file, for the same engine when it is started again."""
        return dump({"format": _FORMAT, "format_version": 1, **self.as_dict()})

    @classmethod
    def load(cls, data: bytes, where: str) -> Limits:
        """Read what `dump` wrote.

        Raises:
            FormatError: it is something else.
        """
        keys = ("format", "format_version", *_NAMES)
        fields = document(data, where, _FORMAT, keys, limit_bytes=_LIMIT_BYTES)
        numbers = {name: number(fields[name], fields.place(name)) for name in _NAMES}
        for name, value in numbers.items():
            if value < 0:
                raise FormatError(f"{where}: {name} must be at least 0, found {value}")
        return cls(**numbers)


def learn(found: Deviation) -> Limits | None:
    """Return the limits that a version with proven weights gives; None if it gives none.

    It gives none where scores are not finite, or differ so much on proven weights that engine and trainer do
    not compute the same function (another quantisation, position encoding, attention mask), or differ
    more through the prefix cache than without it, as a stale one does.

    Example:
        >>> learn(Deviation(64, 0, 0.1, 0.02, 0.001, 0.03, 0, 3))
        Limits(max_difference=0.6000000000000001, mean_difference=0.06, kl=0.009000000000000001)
        >>> learn(Deviation(64, 0, 9.0, 2.5, 1.1, None, 0, 3)) is None
        True
    """
    limits = Limits(
        max_difference=max(FLOOR, MARGINS["max_difference"] * found.max_difference),
        mean_difference=max(FLOOR, MARGINS["mean_difference"] * found.mean_difference),
        kl=max(DIVERGENCE_FLOOR, MARGINS["kl"] * found.kl),
    )
    is_useless = found.mean_difference > USELESS
    return None if is_useless or limits.exceeded(found) else limits


def read_limits(path: Path) -> Limits | None:
    """Return the limits in a file; None if there is no such file.

    Raises:
        FormatError: it holds something else.
    """
    return Limits.load(path.read_bytes(), str(path)) if path.exists() else None
