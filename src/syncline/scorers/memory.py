"""A model of two matrices in numpy: for tests and examples, and what the contract is written against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from syncline.abc import Scorer
from syncline.errors import ConfigError
from syncline.scorers.answers import as_scores, check_top
from syncline.types import Probe, Scores

DECAY = 0.7
"""What is left of a token in the state one place later."""


class MemoryScorer(Scorer):
    """Scores with a state that is a decaying sum of embeddings, and a head on it.

    It keeps the state after each prompt that it has seen, as an engine's prefix cache does: whoever
    changes the weights calls `reset_cache`, or `Scores.resumed` tells of the old ones.

    Args:
        embedding: (vocabulary, width) FP32 or FP64.
        head: (width, vocabulary), the same dtype.
    Aliasing: both are read anew at each call, so a view of live weights follows them.

    Example:
        >>> import numpy as np
        >>> scorer = MemoryScorer(np.eye(4), 3 * np.eye(4))
        >>> [scores] = scorer.score([Probe((1,), (1, 2))], top=2)
        >>> scores.top_tokens.tolist()
        [[1, 0], [1, 0]]
        >>> scores.logprobs.round(3).tolist()
        [-0.139, -5.118]
    """

    name = "memory"

    def __init__(self, embedding: NDArray[np.floating], head: NDArray[np.floating]) -> None:
        if embedding.ndim != 2 or embedding.shape[::-1] != head.shape:
            raise ConfigError(
                "expected an embedding (vocabulary, width) and a head (width, vocabulary), found shapes "
                f"{embedding.shape} and {head.shape}"
            )
        self._embedding = embedding
        self._head = head
        self._states: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def score(self, probes: Sequence[Probe], top: int) -> list[Scores]:
        """Return the scores of every probe; see `Scorer.score`."""
        check_top(top)
        return [self._scores(probe, top) for probe in probes]

    def reset_cache(self) -> None:
        """Forget the states that were kept."""
        self._states.clear()

    def _scores(self, probe: Probe, top: int) -> Scores:
        vocabulary = len(self._embedding)
        if max(probe.tokens) >= vocabulary or top > vocabulary:
            raise ConfigError(
                f"probe: expected token ids, and a top, within a vocabulary of {vocabulary}, found "
                f"{max(probe.tokens)}, and {top}"
            )
        logprobs, ranked = [], []
        for place, token in enumerate(probe.continuation, len(probe.prompt)):
            row = self._row(self._state(probe.tokens[:place]))
            logprobs.append(float(row[token]))
            best = np.argsort(-row, kind="stable")[:top]
            ranked.append([(int(one), float(row[one])) for one in best])
        return as_scores(probe, logprobs, ranked, top, self.name, self._resumed(probe))

    def _resumed(self, probe: Probe) -> float:
        before = probe.tokens[:-1]
        if before not in self._states:
            self._states[before] = self._state(before)
        return float(self._row(self._states[before])[probe.tokens[-1]])

    def _state(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        state = np.zeros(self._embedding.shape[1])
        with np.errstate(all="ignore"):
            for token in tokens:
                state = DECAY * state + self._embedding[token]
        return state

    def _row(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the log-probability of every token."""
        with np.errstate(all="ignore"):
            logits = state @ self._head
            shifted = logits - logits.max()
            row: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
            return row
