"""Texts to score where nobody brings their own: the same for the same seed and the same model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncline.abc import Scorer
from syncline.errors import ConfigError
from syncline.types import Probe

LENGTHS = (8, 24, 40, 300)
"""Prompt lengths: the longest fills several blocks of any engine's prefix cache."""

CONTINUATION = 16
CHOICES = 20
"""Most probable tokens among which a continuation is drawn."""


def draw_probes(
    vocabulary: int,
    *,
    scorer: Scorer | None = None,
    lengths: Sequence[int] = LENGTHS,
    continuation: int = CONTINUATION,
    seed: int = 0,
) -> tuple[Probe, ...]:
    """Return one probe for each prompt length: a prompt of random tokens, and what a model makes of it.

    Random prompts reach more rows of the embedding than sentences do. A random continuation is
    improbable, and where probabilities are small the rounding of large negative logits drowns what is looked for: so
    with a scorer the continuation is drawn from the model's own distribution, once, before training.

    Args:
        vocabulary: token ids are drawn from 0 to this; leave out ids that the model has no embedding for.
        scorer: the trainer's; None: continuations are random too.
        continuation: tokens that are scored in each.

    Raises:
        ConfigError: a number is not above 0.

    Cost: with a scorer, one call of it for every token of a continuation.

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
    texts = [generator.integers(0, vocabulary, length).tolist() for length in lengths]
    for _ in range(continuation):
        for text, token in zip(texts, _next(texts, vocabulary, scorer, generator), strict=True):
            text.append(token)
    return tuple(
        Probe(tuple(text[:length]), tuple(text[length:]))
        for text, length in zip(texts, lengths, strict=True)
    )


def _next(
    texts: Sequence[list[int]],
    vocabulary: int,
    scorer: Scorer | None,
    generator: np.random.Generator,
) -> list[int]:
    """Return one more token for each text."""
    if scorer is None:
        drawn: list[int] = generator.integers(0, vocabulary, len(texts)).tolist()
        return drawn
    asked = [Probe(tuple(text), (text[-1],)) for text in texts]
    tokens = []
    for scores in scorer.score(asked, min(CHOICES, vocabulary)):
        weights = np.exp(scores.top_logprobs[0])
        tokens.append(int(generator.choice(scores.top_tokens[0], p=weights / weights.sum())))
    return tokens
