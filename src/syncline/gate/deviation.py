"""How far an engine's scores lie from the trainer's: a few numbers, and what each of them is exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.errors import FormatError
from syncline.types import Probe, Scores

REST = 1e-6
"""Probability below which the lumped rest is not told apart from rounding of FP32 sums."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """The engine's scores against the trainer's, over every scored token. All in nats.

    Attributes:
        positions: tokens that were scored.
        not_finite: of these, how many the engine gave NaN or an infinity for, or among the most probable
            tokens of whose place it did. They count in no other figure, and none of them is ever
            within a limit.
        max_difference, mean_difference: of the log-probabilities, trainer minus engine, without sign.
        kl: mean over the places of a lower bound of KL(trainer || engine). See `divergence`.
        resumed_difference: largest difference of a last token that the engine computed by way of its prefix
            cache; None if it did not tell.
        probe, place: where `max_difference` is, or the first value that is not finite.
    """

    positions: int
    not_finite: int
    max_difference: float
    mean_difference: float
    kl: float
    resumed_difference: float | None
    probe: int
    place: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def deviation(
    probes: Sequence[Probe], trainer: Sequence[Scores], engine: Sequence[Scores]
) -> Deviation:
    """Compare what an engine says of the probes with what the trainer says.

    Raises:
        FormatError: they do not have the same probes and tokens, or the trainer's scores are not finite.

    Cost: O(places times k).
    """
    if not len(probes) == len(trainer) == len(engine) or not probes:
        raise FormatError(
            f"expected scores of {len(probes)} probes, at least one, from both sides, found "
            f"{len(trainer)} of the trainer's and {len(engine)} of the engine's"
        )
    differences, finite, kls, resumed = [], [], [], []
    for probe, ours, theirs in zip(probes, trainer, engine, strict=True):
        _check(probe, ours, theirs)
        with np.errstate(invalid="ignore"):
            differences.append(np.abs(ours.logprobs - theirs.logprobs))
        is_finite = np.isfinite(theirs.logprobs) & ~np.isnan(theirs.top_logprobs).any(axis=1)
        is_finite[-1] &= theirs.resumed is None or math.isfinite(theirs.resumed)
        finite.append(is_finite)
        kls += [
            divergence(token, *_place(ours, at), *_place(theirs, at))
            for at, token in enumerate(probe.continuation)
            if is_finite[at]
        ]
        if theirs.resumed is not None and math.isfinite(theirs.resumed):
            resumed.append(abs(float(ours.logprobs[-1]) - theirs.resumed))
    every, good = np.concatenate(differences), np.concatenate(finite)
    worst = int(np.argmin(good)) if not good.all() else int(np.argmax(every))
    probe_at, place = _where(worst, differences)
    return Deviation(
        positions=len(every),
        not_finite=int((~good).sum()),
        max_difference=float(every[good].max(initial=0.0)),
        mean_difference=float(every[good].mean()) if good.any() else 0.0,
        kl=math.fsum(kls) / len(kls) if kls else 0.0,
        resumed_difference=max(resumed) if resumed else None,
        probe=probe_at,
        place=place,
    )


Known = dict[int, float]


def divergence(token: int, p_token: float, p_top: Known, q_token: float, q_top: Known) -> float:
    """Return a lower bound, in nats, of the KL divergence of q from p at one place: sum of p log(p/q).

    Each side tells the log-probabilities of its own most probable tokens, and of `token`. Where both tell
    one it is exact; all other tokens are taken together as one, with what is left of 1 on each side. By
    the log sum inequality that never exceeds the divergence over the whole vocabulary. It equals it where the
    tokens that only one side tells, or none, have the same ratio p/q. A rest below `REST` counts as that
    much, so that rounding is not divided by.

    Example:
        >>> half, most = math.log(0.5), math.log(0.9)
        >>> round(divergence(7, half, {7: half, 8: half}, most, {7: most}), 4)
        0.5108
        >>> round(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), 4)
        0.5108
    """
    p_known, q_known = {**p_top, token: p_token}, {**q_top, token: q_token}
    shared = [(p_known[one], q_known[one]) for one in p_known.keys() & q_known.keys()]
    p_rest = max(REST, 1.0 - math.fsum(math.exp(p) for p, _ in shared))
    q_rest = max(REST, 1.0 - math.fsum(math.exp(q) for _, q in shared))
    told = math.fsum(math.exp(p) * (p - max(q, LEAST)) for p, q in shared if p > LEAST)
    return max(0.0, told + p_rest * math.log(p_rest / q_rest))


LEAST = -1e4
"""Stands for the logarithm of a probability of 0; vLLM itself writes -9999 for it."""


def _place(scores: Scores, at: int) -> tuple[float, Known]:
    top = zip(scores.top_tokens[at].tolist(), scores.top_logprobs[at].tolist(), strict=True)
    return float(scores.logprobs[at]), dict(top)


def _check(probe: Probe, trainer: Scores, engine: Scores) -> None:
    count = len(probe.continuation)
    for side, scores in (("trainer", trainer), ("engine", engine)):
        if len(scores.logprobs) != count or len(scores.top_tokens) != count:
            raise FormatError(
                f"expected {count} scored tokens from the {side}, found {len(scores.logprobs)}"
            )
    if not np.isfinite(trainer.logprobs).all() or not np.isfinite(trainer.top_logprobs).all():
        raise FormatError(
            "expected finite scores from the trainer, found NaN or an infinity: its own weights are broken"
        )


def _where(flat: int, rows: Sequence[NDArray[np.float64]]) -> tuple[int, int]:
    """Return row and column of the `flat`-th element of rows of different lengths."""
    for row, values in enumerate(rows):
        if flat < len(values):
            return row, flat
        flat -= len(values)
    raise FormatError(f"expected a place within the scored ones, found {flat} beyond them")
