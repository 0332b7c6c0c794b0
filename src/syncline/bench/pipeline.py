"""One publish and one sync of a synthetic model in several parts, traced: does the work overlap?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from syncline import config
from syncline.abc import WeightSource
from syncline.engines import MemoryEngine
from syncline.stores import FilesystemStore
from syncline.sync import Publisher, Receiver
from syncline.trace import Trace
from syncline.types import Bits, TensorMeta

_TENSORS, _SHAPE = 32, (2048, 1024)
_PART_BYTES = 16 << 20
_WAITING = frozenset({"wait", "spool", "apply"})
"""Phases in which the main thread holds others inside, or waits for other threads."""


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """One operation of the traced run.

    Attributes:
        threads: how many compute.
        busy_s: seconds of work, over all threads; `wall_s`: from the first to the last of it.
        overlap_s: seconds in which at least two threads worked at once.
    """

    name: str
    threads: int
    busy_s: float
    wall_s: float
    overlap_s: float


def bench_pipeline(trace: Trace, density: float = 0.01, seed: int = 0) -> list[PipelineFigures]:
    """Publish and sync `density` of changes over a local store; the trace gets the second round of both."""
    rng = np.random.default_rng(seed)
    source = _Model(rng)
    with tempfile.TemporaryDirectory(prefix="syncline-trace-") as directory:
        store = FilesystemStore(Path(directory))
        options: dict[str, Any] = {"part_bytes": _PART_BYTES, "full_encoding": "planes"}
        publisher = Publisher(store, trace=trace, **options)
        engine = MemoryEngine()
        receiver = Receiver(store, engine, trace=trace)
        figures = []
        for _ in range(2):
            source.step(density)
            seen = len(_spans(trace))
            publisher.publish(source)
            published = _spans(trace)[seen:]
            receiver.sync()
            synced = _spans(trace)[seen + len(published) :]
            figures = [_figures("publish", published), _figures("sync", synced)]
    return figures


class _Model(WeightSource):
    is_stable = True

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._weights: dict[str, tuple[TensorMeta, Bits]] = {}
        for index in range(_TENSORS):
            meta = TensorMeta(f"model.layers.{index}.weight", "BF16", _SHAPE)
            wide = rng.standard_normal(meta.count, np.float32) * np.float32(0.02)
            self._weights[meta.name] = (meta, (wide.view(np.uint32) >> 16).astype(np.uint16))

    def step(self, density: float) -> None:
        """Move so many of the elements by one ulp."""
        for meta, bits in self._weights.values():
            places = np.unique(self._rng.integers(0, meta.count, max(1, int(meta.count * density))))
            bits[places] += self._rng.integers(0, 2, places.size, np.uint16) * 2 - 1

    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        yield from self._weights.values()


def _spans(trace: Trace) -> list[dict[str, Any]]:
    return [event for event in trace.events() if event["ph"] == "X"]


def _figures(name: str, spans: Iterable[Mapping[str, Any]]) -> PipelineFigures:
    spans = [span for span in spans if span["name"] not in _WAITING]
    edges = sorted(
        edge for start, stop, _ in _outermost(spans) for edge in ((start, 1), (stop, -1))
    )
    busy_us = overlap_us = 0.0
    working, since = 0, 0.0
    for at, change in edges:
        busy_us += working * (at - since)
        overlap_us += (at - since) if working > 1 else 0.0
        working, since = working + change, at
    wall_us = edges[-1][0] - edges[0][0] if edges else 0.0
    return PipelineFigures(name, config.threads(), busy_us / 1e6, wall_us / 1e6, overlap_us / 1e6)


def _outermost(spans: list[Mapping[str, Any]]) -> Iterator[tuple[float, float, int]]:
    """Yield start, stop and thread of the spans that lie in no other one of their thread."""
    stops: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        thread, start, stop = span["tid"], span["ts"], span["ts"] + span["dur"]
        if start >= stops.get(thread, -1.0):
            stops[thread] = stop
            yield start, stop, thread
