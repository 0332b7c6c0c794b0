"""What does publishing from every rank cost beside a single process that has everything?

Ranks are threads of this process, so time is shared between them: the figures to compare are bytes, and the
sum of seconds. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import Any

import numpy as np

from syncline import MemoryStore, Publisher, Ranks, ShardedPublisher
from syncline.layouts import scatter
from syncline.layouts.sharded import Shard, Sharding, dtensor_layout
from syncline.types import TensorMeta

RANKS = 4


def main() -> None:
    """Publish two versions of a model of random BF16 weights, 1 % of which move by one ulp."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    sizes = parser.parse_args()
    rng = np.random.default_rng(1)
    metas = [
        TensorMeta(f"layer.{i}", "BF16", (sizes.side, sizes.side)) for i in range(sizes.layers)
    ]
    normal = (rng.standard_normal(sizes.side**2, np.float32) * 0.02).view(np.uint32) >> 16
    old = {meta.name: rng.permutation(normal).astype(np.uint16) for meta in metas}
    report: dict[str, Any] = {"ranks": RANKS, "model_bytes": sum(meta.nbytes for meta in metas)}
    for name, axis in (("rows", 0), ("columns", 1)):
        cut = dict.fromkeys(old, Sharding((RANKS,), (Shard(axis),)))
        layout = dtensor_layout(metas, cut)
        report[name] = _case(layout, metas, old, sizes.runs)
    print(json.dumps(report, indent=1))


def _case(layout: Any, metas: list[TensorMeta], old: dict[str, Any], runs: int) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    ranks = Ranks.threads(RANKS)
    shards = {
        p.rank: {t.name: np.zeros(int(np.prod(t.shape)), np.uint16) for t in p.tensors}
        for p in layout.placements
    }
    store, single_store = MemoryStore(), MemoryStore()
    single = Publisher(single_store)
    new = {name: bits.copy() for name, bits in old.items()}
    made = _all(lambda rank: ShardedPublisher(store, layout, ranks[rank]))
    found: dict[str, Any] = {"single_s": [], "sharded_s": []}
    for _ in range(runs + 1):
        scatter(layout, [(meta, new[meta.name]) for meta in metas], shards)
        whole = {m.name: _shaped(new[m.name], m.shape) for m in metas}
        locals_ = [
            {t.name: _shaped(shards[p.rank][t.name], t.shape) for t in p.tensors}
            for p in layout.placements
        ]
        start_s = time.perf_counter()
        one = single.publish(whole)
        middle_s = time.perf_counter()
        reports = _all(lambda rank: made[rank].publish(locals_[rank]))  # noqa: B023 - called here
        found["single_s"].append(middle_s - start_s)
        found["sharded_s"].append(time.perf_counter() - middle_s)
        found["single_bytes"], found["sharded_bytes"] = one.payload_bytes, reports[0].payload_bytes
        found["phases"] = {key: round(s, 4) for key, s in reports[0].seconds.items()}
        for bits in new.values():
            where = rng.random(bits.size) < 0.01
            bits[where] += 1
    for key in ("single_s", "sharded_s"):
        found[key] = round(float(np.median(found[key][1:])), 4)
    return found


def _shaped(bits: Any, shape: tuple[int, ...]) -> Any:
    import ml_dtypes

    return bits.view(ml_dtypes.bfloat16).reshape(shape)


def _all(act: Any) -> list[Any]:
    found: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        found[rank] = act(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


if __name__ == "__main__":
    main()
