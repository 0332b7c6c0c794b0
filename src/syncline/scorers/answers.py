"""What every scorer does with what a model told it: check it, and lay it out as `Scores`.

An answer of other tokens, of too few, or in another form is an error. A value that is not finite is none:
it is what the model computed, and whoever compares has to see it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from syncline.errors import ConfigError, FormatError
from syncline.types import Probe, Scores

Ranked = Sequence[tuple[int, float]]
"""Token ids with their log-probabilities, in any order, no token twice."""

ABOVE_ONE = 1e-3
"""How far a logarithm of a probability may stand above 0 before it cannot be one: rounding of BF16 logits
does not get there."""


def check_top(top: int) -> None:
    """Check how many of the most probable tokens are asked for.

    Raises:
        ConfigError: less than none.
    """
    if top < 0:
        raise ConfigError(f"top: expected a number of tokens from 0, found {top}")


def as_scores(
    probe: Probe,
    logprobs: Sequence[float],
    ranked: Sequence[Ranked],
    top: int,
    where: str,
    resumed: float | None = None,
) -> Scores:
    """Return what was told of one probe as `Scores`.

    Args:
        logprobs: of each token of the continuation, in order.
        ranked: at each place at least the `top` most probable tokens.
        where: who told it, for messages.

    Raises:
        FormatError: a place is missing or left over, a place has fewer than `top` tokens, or a logarithm
            of a probability is above 0.
    """
    count = len(probe.continuation)
    if len(logprobs) != count or len(ranked) != count:
        refuse(
            where,
            f"scores of the {count} tokens of the continuation",
            f"{len(logprobs)}, and the most probable ones at {len(ranked)} places",
        )
    tokens = np.empty((count, top), np.int64)
    values = np.empty((count, top), np.float64)
    for place, row in enumerate(ranked):
        # NaN has no order: it comes first, so that it is seen.
        best = sorted(row, key=_by_probability)[:top]
        if len(best) < top or len({token for token, _ in row}) < len(row):
            refuse(where, f"{top} different tokens at place {place}", f"{len(row)}: {row!r:.80}")
        tokens[place] = [token for token, _ in best]
        values[place] = [value for _, value in best]
    scores = Scores(np.asarray(logprobs, np.float64), tokens, values, resumed)
    _check_values(scores, where)
    return scores


def no_numbers(probe: Probe, top: int) -> Scores:
    """Return the scores of a probe of which an engine can only tell that what it computed is no number."""
    count = len(probe.continuation)
    values = np.full((count, top), math.nan)
    tokens = np.tile(np.arange(top, dtype=np.int64), (count, 1))
    return Scores(np.full(count, math.nan), tokens, values, math.nan)


def resumed_logprob(token: int, place: Mapping[int, float], where: str) -> float:
    """Return the log-probability of the only token that an engine was allowed to sample.

    Where all logits are NaN, engines sample whatever comes first, allowed or not: then it is NaN.

    Raises:
        FormatError: another token was sampled, with a probability.
    """
    if token not in place and not (place and all(math.isnan(one) for one in place.values())):
        refuse(where, f"token {token}", f"{dict(place)}")
    return place.get(token, math.nan)


def refuse(where: str, expected: str, found: str) -> NoReturn:
    """Raise the error of an answer that is not one.

    Raises:
        FormatError: always.
    """
    raise FormatError(f"{where}: expected {expected}, found {found}; it was not taken for a score")


def _by_probability(entry: tuple[int, float]) -> tuple[bool, float, int]:
    token, value = entry
    return not math.isnan(value), -value, token


def _check_values(scores: Scores, where: str) -> None:
    resumed = [] if scores.resumed is None else [scores.resumed]
    every = np.concatenate([scores.logprobs, scores.top_logprobs.ravel(), resumed])
    over = every[every > ABOVE_ONE]
    if over.size:
        refuse(where, "logarithms of probabilities, at most 0", f"{over[0]:.6g}")
