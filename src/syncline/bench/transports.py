"""Every transport with buckets of several sizes: seconds and peak memory, beside a bare loop of the same bytes."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from syncline.bench import transport_ends as ends
from syncline.bench.transport_ends import NAMES
from syncline.errors import ConfigError, PeerLostError

BUCKET_BYTES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)

_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class TransportFigures:
    """One transport with buckets of one size.

    Attributes:
        nbytes: weights that went from one process to memory of another.
        seconds, bare_s: median of all runs, ours and the bare loop, which were made in turns.
        peak_bytes: what both processes together held at most beside the weights on either side.
    """

    transport: str
    bucket_bytes: int
    nbytes: int
    seconds: float
    bare_s: float
    peak_bytes: int

    @property
    def of_bare(self) -> float:
        """Share of the bare loop's speed that is reached."""
        return self.bare_s / self.seconds


def bench_transports(
    nbytes: int = 64 << 20,
    *,
    buckets: Sequence[int] = BUCKET_BYTES,
    runs: int = 5,
    transports: Sequence[str] = NAMES,
) -> list[TransportFigures]:
    """Move the same weights to a second process over every transport, with buckets of every size.

    The bare loops: memcpy (shared memory), `torch.distributed` broadcasts (collective; left out without torch), a
    file written, flushed and read (store), a TCP socket (peers).

    Raises:
        ConfigError: there is no such transport.
        PeerLostError: the second process died, or its bytes are not the first one's.
    """
    unknown = sorted(set(transports) - set(NAMES))
    if unknown:
        raise ConfigError(f"transports: expected some of {', '.join(NAMES)}, found {unknown}")
    figures: list[TransportFigures] = []
    for name in transports:
        if name != "collective" or find_spec("torch") is not None:
            figures += _measured(name, nbytes, buckets, runs)
    return figures


def _measured(
    name: str, nbytes: int, buckets: Sequence[int], runs: int
) -> Iterator[TransportFigures]:
    bits = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder, _second(name) as far:
        trainer = ends.trainer(name, bits, far, Path(folder))
        before = ends.held()
        try:
            for bucket_bytes in buckets:
                ours, bare, peaks = [], [], []
                for _ in range(runs + 1):  # the first warms up
                    seconds, peak = _run(trainer.move, far, "move", bucket_bytes, before)
                    ours.append(seconds)
                    peaks.append(peak)
                    bare.append(_run(trainer.bare, far, "bare", bucket_bytes, before)[0])
                yield TransportFigures(
                    name,
                    bucket_bytes,
                    nbytes,
                    statistics.median(ours[1:]),
                    statistics.median(bare[1:]),
                    max(peaks[1:]),
                )
        finally:
            trainer.close()


def _run(
    act: Callable[[int], float], far: Connection, what: str, bucket_bytes: int, before: int
) -> tuple[float, int]:
    """Let both sides act; return seconds, and how much more memory than before both had at most."""
    ends.tell(far, [what, bucket_bytes])
    with ends.peak(before) as here:
        seconds = act(bucket_bytes)
    if not far.poll(_WAIT_S):
        raise PeerLostError(f"the second process said nothing in {_WAIT_S} s")
    is_same, there_s, there_bytes = ends.hear(far)
    if not is_same:
        raise PeerLostError("the second process has other bytes than the first")
    return seconds + there_s, here[0] + there_bytes


@contextmanager
def _second(name: str) -> Iterator[Connection]:
    """Yield a connection to a process that is the engine's end."""
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=ends.engine, args=(name, far))
    process.start()
    far.close()
    try:
        yield near
    finally:
        near.close()
        process.join(_WAIT_S)
        process.kill()
        process.join()
