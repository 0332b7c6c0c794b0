"""Texts to score where nobody brings their own: random token ids, the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncline.errors import ConfigError
from syncline.types import Probe

LENGTHS = (8, 24, 40, 300)
"""Prompt lengths: the longest fills several blocks of any engine's prefix cache."""

CONTINUATION = 16


def draw_probes(
    vocabulary: int,
    *,
    lengths: Sequence[int] = LENGTHS,
    continuation: int = CONTINUATION,
    seed: int = 0,
) -> tuple[Probe, ...]:
    """Return one probe of random token ids for each prompt length.

    Random ids reach far more rows of the embedding than sentences do, and they are improbable, so that
    the tail of the distribution is scored too. They say nothing of how good a model is, and need not.

    Args:
        vocabulary: token ids are drawn from 0 to this; leave out ids that the model has no embedding for.
        continuation: tokens that are scored in each.

    Raises:
        ConfigError: a number is not above 0.

    Example:
        >>> draw_probes(100, lengths=(3,), continuation=2)
        (Probe(prompt=(85, 63, 51), continuation=(26, 30)),)
    """
    if min((vocabulary, continuation, *lengths), default=0) < 1 or not lengths:
        raise ConfigError(
            "probes: expected a vocabulary, a continuation and prompt lengths above 0, found "
            f"{vocabulary}, {continuation} and {tuple(lengths)}"
        )
    generator = np.random.default_rng(seed)
    probes = []
    for length in lengths:
        tokens = generator.integers(0, vocabulary, length + continuation).tolist()
        probes.append(Probe(tuple(tokens[:length]), tuple(tokens[length:])))
    return tuple(probes)
