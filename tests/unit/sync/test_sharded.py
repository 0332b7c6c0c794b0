"""Every rank publishes its own part: the version is the one that a single process publishes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_files import case_paths, read_case
from syncline import MemoryEngine, MemoryStore, Publisher, Receiver, ShardedPublisher
from syncline.abc import WeightSource
from syncline.errors import (
    BaseVersionError,
    ConfigError,
    CoverageError,
    LayoutError,
    PlanDisagreementError,
    StoreError,
    SynclineError,
    TransportTimeoutError,
    VerifyError,
    VersionConflictError,
)
from syncline.layouts import Layout, gather, scatter
from syncline.layouts.sharded import Shard, Sharding, dtensor_layout, flat_layout
from syncline.sync import Ranks
from syncline.sync.history import History
from syncline.types import Bits, TensorMeta, unsigned

Shards = dict[int, dict[str, Bits]]
WAIT_S = 60.0


class Canonical(WeightSource):
    """Whole tensors, as a single process has them."""

    def __init__(self, tensors: dict[str, tuple[TensorMeta, Bits]]) -> None:
        self._tensors = tensors

    def tensors(self):  # type: ignore[no-untyped-def]
        yield from self._tensors.values()


def on_all(size: int, act: Callable[[int], Any]) -> list[Any]:
    """Do something on every rank at once; return what each returned or raised."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
        assert not thread.is_alive(), "a rank hangs"
    return found


def all_well(found: list[Any]) -> list[Any]:
    for item in found:
        if isinstance(item, BaseException):
            raise item
    return found


def arrays(layout: Layout, shards: Shards, rank: int) -> dict[str, np.ndarray]:
    """A rank's bits in the shapes and dtypes of its local tensors."""
    import ml_dtypes

    types = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I32": np.int32, "U8": np.uint8, "I64": np.int64}
    tensors = next(p.tensors for p in layout.placements if p.rank == rank)
    return {t.name: shards[rank][t.name].view(types[t.dtype]).reshape(t.shape) for t in tensors}


def publishers(
    store: Any, layout: Layout, *, timeout_s: float = WAIT_S, **options: Any
) -> list[Any]:
    ranks = Ranks.threads(len(layout.placements), timeout_s=timeout_s)
    return on_all(
        len(ranks), lambda rank: ShardedPublisher(store, layout, ranks[rank], **options)
    )


def publish(made: list[Any], layout: Layout, shards: Shards, **how: Any) -> list[Any]:
    return on_all(len(made), lambda r: made[r].publish(arrays(layout, shards, r), **how))


def assert_same_version(one: Any, other: Any) -> None:
    """Two stores hold the same version in canonical terms: bits, fingerprints, counts, kind."""
    engines = MemoryEngine(), MemoryEngine()
    manifests = []
    for store, engine in zip((one, other), engines, strict=True):
        Receiver(store, engine, verify="full").sync()
        current = History.open(store).current
        assert current is not None
        manifests.append(current.manifest)
    assert manifests[0].kind == manifests[1].kind
    assert manifests[0].fingerprint == manifests[1].fingerprint
    assert len(manifests[0].tensors) == len(manifests[1].tensors)
    for mine, theirs in zip(manifests[0].tensors, manifests[1].tensors, strict=True):
        assert (mine.meta, mine.fingerprint, mine.changed) == (
            theirs.meta,
            theirs.fingerprint,
            theirs.changed,
        )
        np.testing.assert_array_equal(
            engines[0].view(mine.meta.name), engines[1].view(mine.meta.name)
        )


def step(
    layout: Layout, canonical: dict[str, tuple[TensorMeta, Bits]], share: float, seed: int
) -> dict[str, tuple[TensorMeta, Bits]]:
    """Change a share of all elements; what is stored twice changes twice."""
    rng = np.random.default_rng(seed)
    new = {name: (meta, bits.copy()) for name, (meta, bits) in canonical.items()}
    for name, (meta, bits) in new.items():
        if name.endswith(".embed_tokens.weight") and ".layers." in name:
            bits[:] = new["model.embed_tokens.weight"][1]
            continue
        if name.endswith("shared_head.head.weight"):
            bits[:] = new["lm_head.weight"][1]
            continue
        where = rng.random(bits.size) < share
        bits[where] ^= bits.dtype.type(1)
    return new


def scattered(layout: Layout, tensors: dict[str, tuple[TensorMeta, Bits]], shards: Shards) -> None:
    scatter(layout, [tensors[name] for name in layout.catalog], shards)


@pytest.fixture(
    scope="module", params=case_paths(), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.mark.parametrize("start", ["base", "shards"])
def test_megatron_ranks_publish_what_one_process_would(folder: Path, start: str) -> None:
    case = read_case(folder)
    layout, shards = case.layout(), case.bits()
    ours, theirs = MemoryStore(), MemoryStore()
    single = Publisher(theirs)
    base = folder.parent / "huggingface" if start == "base" else None
    made = all_well(publishers(ours, layout, base=base))
    if start == "shards":
        all_well(publish(made, layout, shards))
    single.publish(Canonical(case.checkpoint))
    assert_same_version(ours, theirs)
    tensors = case.checkpoint
    for seed, share in enumerate((0.01, 0.0, 0.6)):
        tensors = step(layout, tensors, share, seed)
        scattered(layout, tensors, shards)
        reports = all_well(publish(made, layout, shards))
        expected = single.publish(Canonical(tensors))
        assert {report.changed for report in reports} == {expected.changed}
        assert {report.version for report in reports} == {expected.version}
        assert_same_version(ours, theirs)
    all_well(publish(made, layout, shards, full=True))
    single.publish(Canonical(tensors), full=True)
    assert_same_version(ours, theirs)
