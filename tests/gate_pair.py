"""A trainer and an engine around two matrices: publish, sync, score; for tests of the gate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver, TensorMeta
from syncline.gate import Committed, draw_probes, publish_scores
from syncline.scorers import MemoryScorer
from syncline.types import unsigned

VOCABULARY, WIDTH = 50, 16
PROBES = draw_probes(VOCABULARY, lengths=(4, 12, 40), continuation=8)


class Pair:
    """A run of versions, and an engine that follows it, both over the same two tensors.

    The engine computes in FP32, the trainer in FP64: on the same bits they differ by rounding.

    Attributes:
        live: the engine's own memory by tensor.
        scorer: scores by it, through a cache of prefixes that nothing resets but `sync`.
    """

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.weights = {
            "embedding": self.rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32),
            "head": self.rng.standard_normal((WIDTH, VOCABULARY)).astype(np.float32),
        }
        self.live: dict[str, NDArray[np.float32]] = {}
        self.store = MemoryStore()
        self.publisher = Publisher(self.store)
        self.receiver = Receiver(self.store, MemoryEngine(allocate=self._allocate))
        self.resets_cache = True
        self.scorer: EngineScorer | None = None

    def publish(self, *, scored: bool = True) -> Committed:
        """Publish, score by the trainer's weights, let the engine follow; return what it committed."""
        report = self.publisher.publish(self.weights)
        if scored:
            trainer = MemoryScorer(*(weight.astype(np.float64) for weight in self.weights.values()))
            publish_scores(self.store, report.version, report.manifest_sha256, trainer, PROBES)
        return self.sync()

    def step(self) -> Committed:
        """Change about 2 % of the weights by 1 %, and publish."""
        for weight in self.weights.values():
            flat = weight.reshape(-1)
            flat[self.rng.integers(0, flat.size, flat.size // 50)] *= np.float32(1.01)
        return self.publish()

    def sync(self, version: int | None = None) -> Committed:
        """Bring the engine to a version, by default the newest, as a receiver does."""
        applied = self.receiver.sync(version)
        if self.scorer is None:
            self.scorer = EngineScorer(self.live["embedding"], self.live["head"])
        if self.resets_cache:
            self.scorer.reset_cache()
        return Committed(applied.version, applied.manifest_sha256, is_proven=True)

    def _allocate(self, meta: TensorMeta) -> NDArray[np.unsignedinteger]:
        bits = np.empty(meta.unit_count, unsigned(meta.unit_bytes))
        self.live[meta.name] = bits.view(np.float32).reshape(meta.shape)
        return bits


class EngineScorer(MemoryScorer):
    """Computes states in FP32, as an engine with kernels of its own does."""

    name = "engine"

    def _state(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        state = np.zeros(WIDTH, np.float32)
        with np.errstate(all="ignore"):
            for token in tokens:
                state = np.float32(0.7) * state + self._embedding[token]
        return state
