"""What does a broadcast of a version cost beside a bare Gloo broadcast of the same bytes?

Three processes of this machine: a trainer and two engines. In the same run, and in turns: the weights as buckets
through `CollectiveOutlet`, and a bare loop that broadcasts as many bytes, bucket after bucket, in a Gloo group of the
same three; of both it is the trainer's time until its last broadcast has ended. Then a delta through `Publisher` and
`Receiver`, beside a bare broadcast of its payload's bytes: `wire_over_bare` compares the broadcasts alone,
`delivery_over_bare` all from the offer until every engine has proved, written and committed it. At last `ranks`: two trainer
ranks, each of which holds half of every matrix and sends what it owns, beside a bare loop in which each of the two broadcasts half of
the bytes to both engines at the same time. Prints JSON, or writes it with --out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from machine import machine

from syncline import (
    MemoryEngine,
    MemoryStore,
    Publisher,
    Ranks,
    Receiver,
    ShardedPublisher,
    open_store,
)
from syncline.channels import CollectiveInlet, CollectiveOutlet
from syncline.format.bucket import pack
from syncline.layouts.sharded import Shard, Sharding, dtensor_layout
from syncline.types import TensorMeta

WAIT_S = 300.0
ENGINES = ("a", "b")
HOST = "127.0.0.1"
TENSOR_BYTES = 32 << 20
CHANGED_STRIDE = 100


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=1000.0)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    metas = _metas(int(options.megabytes * 1e6))
    report: dict[str, Any] = {
        "machine": machine("torch"),
        "load_average": os.getloadavg(),
        "bytes": sum(meta.nbytes for meta in metas),
        "engines": len(ENGINES),
        "runs": options.runs,
        "full": [_full(metas, mib << 20, options.runs) for mib in options.bucket_mib],
        "delta": _delta(metas, options.runs),
        "ranks": {kind: _ranks(metas, options.runs, kind) for kind in ("full", "delta")},
    }
    text = json.dumps(report, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")


def _metas(nbytes: int) -> list[TensorMeta]:
    count = max(1, nbytes // TENSOR_BYTES)
    return [TensorMeta(f"layer.{i:03d}", "BF16", (TENSOR_BYTES // 2,)) for i in range(count)]


def _weights(metas: list[TensorMeta]) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {meta.name: rng.integers(0, 1 << 16, meta.unit_count, np.uint16) for meta in metas}


def _full(metas: list[TensorMeta], bucket_bytes: int, runs: int) -> dict[str, Any]:
    buckets = pack(metas, bucket_bytes)
    sizes = [each.nbytes for each in buckets]
    weights = _weights(metas)
    outlet = CollectiveOutlet(f"{HOST}:0")
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    engines = _start(_take, outlet.address, store.port, sizes, runs + 1)
    try:
        outlet.wait(len(ENGINES), WAIT_S)
        bare = _group(store, 0)
        buffer = torch.zeros(bucket_bytes, dtype=torch.uint8)
        ours, plain = [], []
        for _ in range(runs + 1):
            plain.append(_broadcasts(bare, buffer, sizes))
            _rendezvous(bare)
            started_s = time.perf_counter()
            with outlet.round(list(outlet.members()), sizes, WAIT_S) as send:
                for each in buckets:
                    send(
                        [
                            (
                                p.offset,
                                weights[p.meta.name][p.start // 2 : (p.start + p.nbytes) // 2],
                            )
                            for p in each.pieces
                        ]
                    )
            ours.append(time.perf_counter() - started_s)
            _rendezvous(bare)
    finally:
        outlet.close()
        _stop(engines)
    total = sum(sizes)
    return {
        "bucket_bytes": bucket_bytes,
        "bare_s": plain[1:],
        "ours_s": ours[1:],
        "bare_bytes_per_s": total / statistics.median(plain[1:]),
        "ours_bytes_per_s": total / statistics.median(ours[1:]),
        "share_of_bare": statistics.median(
            one / other for one, other in zip(plain[1:], ours[1:], strict=True)
        ),
    }


def _delta(metas: list[TensorMeta], runs: int) -> dict[str, Any]:
    weights = _weights(metas)
    outlet = CollectiveOutlet(f"{HOST}:0")
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    publisher = Publisher(
        MemoryStore(), live=outlet, encoding="indices", anchor_every=None, live_timeout_s=WAIT_S
    )
    engines = _start(_follow, outlet.address, store.port, runs)
    rows = []
    try:
        outlet.wait(len(ENGINES), WAIT_S)
        bare = _group(store, 0)
        publisher.publish(weights)
        for _ in range(runs):
            for bits in weights.values():
                bits[::CHANGED_STRIDE] += 1
            marks: dict[str, float] = {}
            publisher._live._observe = lambda step, marks=marks: marks.setdefault(  # noqa: SLF001
                step.name, time.perf_counter()
            )
            report = publisher.publish(weights)
            if report.delivery is None:
                raise RuntimeError("nothing was delivered")
            report.delivery.require()
            sizes = _cut(report.payload_bytes, 16 << 20)
            store.set(f"sizes/{report.version}", json.dumps(sizes))
            plain_s = _broadcasts(bare, torch.zeros(16 << 20, dtype=torch.uint8), sizes)
            _rendezvous(bare)
            rows.append(
                {
                    "payload_bytes": report.payload_bytes,
                    "bare_s": plain_s,
                    "wire_s": marks["deliver.sent"] - marks["deliver.opened"],
                    "delivery_s": marks["deliver.done"] - marks.get("deliver.offered", 0.0),
                    "phases": report.delivery.moved.as_dict(),
                }
            )
    finally:
        outlet.close()
        _stop(engines)
    return {
        "rows": rows,
        "wire_over_bare": statistics.median(row["wire_s"] / row["bare_s"] for row in rows),
        "delivery_over_bare": statistics.median(row["delivery_s"] / row["bare_s"] for row in rows),
    }


def _ranks(metas: list[TensorMeta], runs: int, kind: str) -> dict[str, Any]:
    outlet = CollectiveOutlet(f"{HOST}:0")
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    engines = _start(_follow_ranks, outlet.address, store.port, runs)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        other = context.Process(
            target=_publish_ranks, args=(1, store.port, folder, metas, runs, kind)
        )
        other.start()
        try:
            rows = _publish_ranks(0, store.port, folder, metas, runs, kind, outlet)
        finally:
            outlet.close()
            _stop([*engines, other])
    return {
        "rows": rows,
        "wire_over_bare": statistics.median(row["wire_s"] / row["bare_s"] for row in rows),
        "delivery_over_bare": statistics.median(row["delivery_s"] / row["bare_s"] for row in rows),
    }


def _publish_ranks(
    rank: int,
    port: int,
    folder: str,
    metas: list[TensorMeta],
    runs: int,
    kind: str,
    outlet: CollectiveOutlet | None = None,
) -> list[dict[str, float]]:
    """Be one of two trainer ranks."""
    store = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=rank, world_size=2)
    square = [TensorMeta(meta.name, meta.dtype, (TENSOR_BYTES // 8192, 4096)) for meta in metas]
    layout = dtensor_layout(
        square, {meta.name: Sharding((2,), (Shard(at % 2),)) for at, meta in enumerate(square)}
    )
    shards = {
        meta.name: torch.zeros(
            [side // 2 if axis == at % 2 else side for axis, side in enumerate(meta.shape)],
            dtype=torch.bfloat16,
        )
        for at, meta in enumerate(square)
    }
    live = CollectiveOutlet(f"{HOST}:0") if outlet is None else outlet
    marks: dict[str, float] = {}
    publisher = ShardedPublisher(
        open_store(folder),
        layout,
        Ranks.torch(timeout_s=WAIT_S),
        live=live,
        encoding="indices",
        anchor_every=None,
        live_timeout_s=WAIT_S,
        live_kind="full" if kind == "full" else "auto",
        observe=lambda step: marks.setdefault(step.name, time.perf_counter()),
    )
    if outlet is not None:
        outlet.wait(len(ENGINES), WAIT_S)
    bare = _group(store, 0, f"bare{rank}")
    publisher.publish(shards)
    rows = []
    for _ in range(runs):
        for shard in shards.values():
            shard.view(torch.int16).view(-1)[::CHANGED_STRIDE] += 1
        marks.clear()
        report = publisher.publish(shards)
        if report.delivery is None:
            raise RuntimeError("nothing was delivered")
        report.delivery.require()
        nbytes = report.full_bytes if kind == "full" else report.payload_bytes
        sizes = _cut(nbytes // 2, 16 << 20)
        if rank == 0:
            store.set(f"sizes/{report.version}", json.dumps(sizes))
        _rendezvous(bare)
        bare_s = _broadcasts(bare, torch.zeros(16 << 20, dtype=torch.uint8), sizes)
        dist.barrier()
        rows.append(
            {
                "bytes": nbytes,
                "bare_s": bare_s,
                "wire_s": marks.get("deliver.sent", 0.0) - marks.get("deliver.opened", 0.0),
                "delivery_s": marks.get("deliver.done", 0.0) - marks.get("deliver.offered", 0.0),
            }
        )
    dist.destroy_process_group()
    return rows


def _follow_ranks(address: str, port: int, number: int, runs: int) -> None:
    """Be an engine of two trainer ranks, and one end of both bare loops."""
    receiver = Receiver(
        CollectiveInlet(address, name=ENGINES[number], timeout_s=WAIT_S), MemoryEngine()
    )
    receiver._inlet.channel()  # noqa: SLF001 - the trainer waits for it before it publishes
    store = dist.TCPStore(HOST, port, is_master=False)
    bare = [_group(store, number + 1, f"bare{rank}") for rank in range(2)]
    receiver.sync()
    buffers = [torch.zeros(16 << 20, dtype=torch.uint8) for _ in bare]
    options = dist.BroadcastOptions()
    options.rootRank = 0
    for _ in range(runs):
        version = receiver.sync().version
        sizes = json.loads(store.get(f"sizes/{version}"))
        for group in bare:
            _rendezvous(group)
        for size in sizes:
            pairs = zip(bare, buffers, strict=True)
            for work in [group.broadcast([buffer[:size]], options) for group, buffer in pairs]:
                work.wait()


def _cut(nbytes: int, bucket_bytes: int) -> list[int]:
    return [min(bucket_bytes, nbytes - start) for start in range(0, nbytes, bucket_bytes)]


def _take(address: str, port: int, number: int, sizes: list[int], rounds: int) -> None:
    """Be an engine that takes buckets and looks at them, and one end of the bare loop."""
    inlet = CollectiveInlet(address, name=ENGINES[number], timeout_s=WAIT_S)
    inlet.channel()
    store = dist.TCPStore(HOST, port, is_master=False)
    bare = _group(store, number + 1)
    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    for _ in range(rounds):
        _broadcasts(bare, buffer, sizes)
        _rendezvous(bare)
        for bits in inlet.buckets(sizes):
            bits[:1].sum()
        _rendezvous(bare)
    inlet.close()


def _follow(address: str, port: int, number: int, runs: int) -> None:
    """Be an engine that takes versions, and one end of the bare loop."""
    receiver = Receiver(
        CollectiveInlet(address, name=ENGINES[number], timeout_s=WAIT_S), MemoryEngine()
    )
    receiver._inlet.channel()  # noqa: SLF001 - the trainer waits for it before it publishes
    store = dist.TCPStore(HOST, port, is_master=False)
    bare = _group(store, number + 1)
    receiver.sync()
    for _ in range(runs):
        version = receiver.sync().version
        sizes = json.loads(store.get(f"sizes/{version}"))
        _broadcasts(bare, torch.zeros(16 << 20, dtype=torch.uint8), sizes)
        _rendezvous(bare)


def _broadcasts(group: Any, buffer: Any, sizes: list[int]) -> float:
    started_s = time.perf_counter()
    options = dist.BroadcastOptions()
    options.rootRank = 0
    for size in sizes:
        group.broadcast([buffer[:size]], options).wait()
    return time.perf_counter() - started_s


def _rendezvous(group: Any) -> None:
    group.barrier(dist.BarrierOptions()).wait()


def _group(store: Any, rank: int, name: str = "bare") -> Any:
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001
    options._timeout = timedelta(seconds=WAIT_S)  # noqa: SLF001
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]  # noqa: SLF001
    named = dist.PrefixStore(name, store)
    return dist.ProcessGroupGloo(named, rank, len(ENGINES) + 1, options)


def _start(target: Any, address: str, port: int, *arguments: Any) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    engines = [
        context.Process(target=target, args=(address, port, number, *arguments))
        for number in range(len(ENGINES))
    ]
    for engine in engines:
        engine.start()
    return engines


def _stop(engines: list[Any]) -> None:
    for engine in engines:
        engine.join(10.0)
        engine.kill()
        engine.join()


if __name__ == "__main__":
    main()
