"""How fast are full weights handed to an engine in another process of this machine, beside a plain memcpy?

Two processes: a trainer that holds the weights, and an engine that copies every bucket to memory of its own. In
the same run, and in turns: memcpy of the same bytes in one process. Every byte is compared at the end. Then the same
weights through `Publisher` and `Receiver`, which find changes, prove fingerprints, keep a journal and commit; those
seconds are told by phase. Prints JSON, or writes it with --out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.channels import SharedMemoryInlet, SharedMemoryOutlet
from syncline.format.bucket import Bucket, pack
from syncline.types import Bits, TensorMeta

WAIT_S = 300.0
SEED = 3
TENSOR_BYTES = 64 << 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--bucket-kib", type=int, nargs="+", default=[512, 1024, 2048, 4096, 16384])
    parser.add_argument(
        "--no-publish", action="store_true", help="leave Publisher and Receiver out"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    metas = _metas(int(options.gigabytes * 1e9))
    report: dict[str, Any] = {
        "machine": machine(),
        "load_average": os.getloadavg(),
        "bytes": sum(meta.nbytes for meta in metas),
        "runs": options.runs,
        "handed_over": [_handed_over(metas, kib << 10, options.runs) for kib in options.bucket_kib],
    }
    if not options.no_publish:
        report["published"] = _published(metas, options.runs)
    text = json.dumps(report, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")


def _metas(nbytes: int) -> list[TensorMeta]:
    count = max(1, nbytes // TENSOR_BYTES)
    return [TensorMeta(f"layer.{i:03d}", "BF16", (TENSOR_BYTES // 2,)) for i in range(count)]


def _weights(metas: list[TensorMeta]) -> dict[str, Bits]:
    rng = np.random.default_rng(SEED)
    return {meta.name: rng.integers(0, 1 << 16, meta.unit_count, np.uint16) for meta in metas}


def _handed_over(metas: list[TensorMeta], bucket_bytes: int, runs: int) -> dict[str, Any]:
    buckets = pack(metas, bucket_bytes)
    weights = _weights(metas)
    copy = {name: np.zeros_like(bits) for name, bits in weights.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/path"
        outlet = SharedMemoryOutlet(path)
        engine = multiprocessing.get_context("spawn").Process(
            target=_engine, args=(path, metas, bucket_bytes, runs + 1)
        )
        engine.start()
        try:
            outlet.wait(1, WAIT_S)
            ours, plain = [], []
            for _ in range(runs + 1):
                plain.append(_memcpy(weights, copy))
                ours.append(_send(outlet, buckets, weights))
            verdict = outlet.members()["engine"].receive(WAIT_S)
        finally:
            outlet.close()
            engine.join(WAIT_S)
            engine.kill()
    if verdict != b"same":
        raise RuntimeError("the engine's bytes are not the trainer's")
    total = sum(meta.nbytes for meta in metas)
    return {
        "bucket_bytes": bucket_bytes,
        "memcpy_s": plain[1:],
        "handed_over_s": ours[1:],
        "memcpy_bytes_per_s": total / statistics.median(plain[1:]),
        "handed_over_bytes_per_s": total / statistics.median(ours[1:]),
        "share_of_memcpy": statistics.median(
            one / other for one, other in zip(plain[1:], ours[1:], strict=True)
        ),
    }


def _memcpy(weights: dict[str, Bits], copy: dict[str, Bits]) -> float:
    started_s = time.perf_counter()
    for name, bits in weights.items():
        np.copyto(copy[name], bits)
    return time.perf_counter() - started_s


def _send(
    outlet: SharedMemoryOutlet, buckets: tuple[Bucket, ...], weights: dict[str, Bits]
) -> float:
    started_s = time.perf_counter()
    with outlet.round(["engine"], [each.nbytes for each in buckets], WAIT_S) as send:
        for each in buckets:
            send(
                [
                    (p.offset, weights[p.meta.name][p.start // 2 : (p.start + p.nbytes) // 2])
                    for p in each.pieces
                ]
            )
    return time.perf_counter() - started_s


def _engine(path: str, metas: list[TensorMeta], bucket_bytes: int, rounds: int) -> None:
    buckets = pack(metas, bucket_bytes)
    own = {meta.name: np.zeros(meta.nbytes, np.uint8) for meta in metas}
    inlet = SharedMemoryInlet(path, name="engine", timeout_s=WAIT_S)
    channel = inlet.channel()
    for _ in range(rounds):
        for each, bits in zip(buckets, inlet.buckets([b.nbytes for b in buckets]), strict=True):
            for p in each.pieces:
                np.copyto(own[p.meta.name][p.start : p.start + p.nbytes], bits[p.offset : p.stop])
    wanted = _weights(metas)
    is_same = all(np.array_equal(own[name], wanted[name].view(np.uint8)) for name in own)
    channel.send(b"same" if is_same else b"different")
    time.sleep(0.2)
    inlet.close()


def _published(metas: list[TensorMeta], runs: int) -> dict[str, Any]:
    """Publish the weights again and again, 1 % changed each time, and tell the phases of the last one."""
    weights = _weights(metas)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/path"
        outlet = SharedMemoryOutlet(path)
        publisher = Publisher(
            MemoryStore(), live=outlet, encoding="indices", anchor_every=None, live_timeout_s=WAIT_S
        )
        engine = multiprocessing.get_context("spawn").Process(target=_receive, args=(path, runs))
        engine.start()
        try:
            outlet.wait(1, WAIT_S)
            for _ in range(runs):
                for bits in weights.values():
                    bits[::100] += 1
                report = publisher.publish(weights)
                if report.delivery is None:
                    raise RuntimeError("nothing was delivered")
                report.delivery.require()
        finally:
            outlet.close()
            engine.join(WAIT_S)
            engine.kill()
    return {"publish_seconds": dict(report.seconds), "delivery": report.delivery.moved.as_dict()}


def _receive(path: str, runs: int) -> None:
    receiver = Receiver(SharedMemoryInlet(path, name="engine", timeout_s=WAIT_S), MemoryEngine())
    for _ in range(runs):
        receiver.sync()


if __name__ == "__main__":
    main()
