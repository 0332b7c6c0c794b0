"""How long does a delta take over a slow, long link, against its bytes at the link's rate, and against a full version?

Two network namespaces with a veth pair between them; Linux's token bucket (`tc tbf`) holds each direction to a rate. An S3
server and a trainer lie in one, an engine in the other (or, with `--store-beside engine`, the trainer alone). A full version
at the first rate, then some deltas at each rate: each is published, then pulled. Beside each, in turns, obstore alone puts as
many bytes and gets the very objects, over the same link. There is no netem in every kernel, so the long way is a pause before each
answer of the server: one round trip per request. Needs root, iproute2 and moto.

Prints JSON: `sync_s` is the engine's side alone, from asking for HEAD to the commit; `whole_s` goes from the beginning of the
publish to that commit, which the engine is told of at once. The bucket lets 256 KiB through before it holds anything back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "src")]

from bench_sync import CaseSource  # noqa: E402
from machine import machine  # noqa: E402

from s3_server import S3Server, environment, s3_service  # noqa: E402

SERVER, CLIENT = "syncline-far", "syncline-near"
SERVER_IP, CLIENT_IP = "192.0.2.1", "192.0.2.2"
PREFIX = "run"


@contextmanager
def namespaces(rate_mbit: int) -> Iterator[None]:
    """Two namespaces and a link between them, held to a rate each way; gone afterwards."""
    with ExitStack() as made:
        for name in (SERVER, CLIENT):
            ip("netns", "add", name)
            made.callback(ip, "netns", "del", name)
        ip("link", "add", "far", "netns", SERVER, "type", "veth", "peer", "near", "netns", CLIENT)
        for name, device, address in (
            (SERVER, "far", SERVER_IP),
            (CLIENT, "near", CLIENT_IP),
        ):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
            hold_to(name, device, rate_mbit, "add")
        yield


def hold_to(name: str, device: str, rate_mbit: int, verb: str) -> None:
    """Let a namespace's device send at most so fast."""
    ip("netns", "exec", name, "tc", "qdisc", verb, "dev", device, "root", "tbf", "rate", f"{rate_mbit}mbit",
       "burst", "256kb", "latency", "100ms")  # fmt: skip


def ip(*arguments: str) -> None:
    """Run iproute2's `ip`."""
    subprocess.run(["ip", *arguments], check=True)


class Side:
    """This script in a namespace with a role: a trainer or an engine that does one thing each time it is asked to."""

    def __init__(
        self, namespace: str, role: str, arguments: argparse.Namespace, endpoint: str
    ) -> None:
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, __file__, "--role", role,
             "--share", str(arguments.share), "--megabytes", str(arguments.megabytes),
             "--part-mebibytes", str(arguments.part_mebibytes)],
            env={**os.environ, **environment(endpoint), "ENDPOINT": endpoint},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def ask(self) -> dict[str, Any]:
        """Let it do its thing and return what it says of it."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def source_of(megabytes: int) -> CaseSource:
    """Return about so many megabytes of weights."""
    source = CaseSource()
    kept, total_bytes = {}, 0
    for name, (meta, bits) in source.weights.items():
        if kept and total_bytes + meta.nbytes > megabytes * 1_000_000 * 1.05:
            continue
        kept[name] = (meta, bits)
        total_bytes += meta.nbytes
    source.weights = kept
    return source


def publishes(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Publish a full version, then deltas, each with as many bytes by obstore alone after it."""
    import obstore

    import syncline

    source = source_of(arguments.megabytes)
    service = s3_service(os.environ["ENDPOINT"], "bare")
    publisher = syncline.Publisher(
        syncline.open_store(f"s3://bucket/{PREFIX}"),
        part_bytes=arguments.part_mebibytes << 20,
        anchor_every=None,
    )
    while True:
        begun_at = time.monotonic()
        report, seconds = timed(lambda: publisher.publish(source))
        _, bare_s = timed(lambda report=report: report.kind == "full" or obstore.put(
            service, f"v{report.version}", os.urandom(report.payload_bytes)))  # fmt: skip
        yield {
            "begun_at": begun_at,
            "model_bytes": report.full_bytes,
            "publish_s": seconds,
            "bare_put_s": bare_s,
        }
        source.step(arguments.share)


def pulls(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:  # noqa: ARG001 - as `publishes`
    """Pull the version that HEAD names, then get its parts with obstore alone, one after the other."""
    import obstore

    import syncline

    receiver = syncline.Receiver(
        syncline.open_store(f"s3://bucket/{PREFIX}"), syncline.MemoryEngine()
    )
    service = s3_service(os.environ["ENDPOINT"], PREFIX)
    while True:
        report, seconds = timed(receiver.sync)
        committed_at = time.monotonic()
        listed = obstore.list(service, f"weight_v{report.version:06d}")
        keys = [meta["path"] for batch in listed for meta in batch]
        parts = [key for key in keys if key.endswith(".safetensors")]
        is_full = report.version == 1
        _, bare_s = timed(lambda parts=parts, is_full=is_full: is_full or [
            obstore.get(service, key).bytes() for key in parts])  # fmt: skip
        yield {
            "committed_at": committed_at,
            "payload_bytes": report.payload_bytes,
            "sync_s": seconds,
            "bare_get_s": bare_s,
            "phases_s": report.seconds,
        }


def timed(job):  # noqa: ANN001, ANN201
    """Return what a job returns and the seconds it took."""
    start_s = time.perf_counter()
    result = job()
    return result, time.perf_counter() - start_s


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the link, publish and pull version by version, and return the figures."""
    sides = (SERVER, CLIENT) if arguments.store_beside == "trainer" else (CLIENT, SERVER)
    with (
        namespaces(arguments.rates_mbit[0]),
        S3Server(namespace=SERVER, host=SERVER_IP, pause_ms=arguments.pause_ms) as server,
    ):
        subprocess.run(
            ["ip", "netns", "exec", SERVER, sys.executable, "-c",
             f"import urllib.request as r; r.urlopen(r.Request('{server.url}/bucket', b'', method='PUT'))"],
            check=True,
        )  # fmt: skip
        with (
            Side(sides[0], "publishes", arguments, server.url) as trainer,
            Side(sides[1], "pulls", arguments, server.url) as engine,
        ):
            first, full = trainer.ask(), engine.ask()
            rows = [
                row_of(rate_mbit, arguments.rounds, trainer, engine)
                for rate_mbit in arguments.rates_mbit
            ]
    full_nominal_s = full["payload_bytes"] / (arguments.rates_mbit[0] * 1e6 / 8)
    return {
        **machine("obstore", "moto"),
        "store_beside": arguments.store_beside,
        "pause_ms": arguments.pause_ms,
        "share": arguments.share,
        "part_mebibytes": arguments.part_mebibytes,
        "model_bytes": first["model_bytes"],
        "full_bytes": full["payload_bytes"],
        "full_publish_s": first["publish_s"],
        "full_sync_s": full["sync_s"],
        "full_over_nominal": max(first["publish_s"], full["sync_s"]) / full_nominal_s,
        "deltas": rows,
    }


def row_of(rate_mbit: int, rounds: int, trainer: Side, engine: Side) -> dict[str, Any]:
    """Return the figures of some deltas at one rate."""
    hold_to(SERVER, "far", rate_mbit, "change")
    hold_to(CLIENT, "near", rate_mbit, "change")
    both = [trainer.ask() | engine.ask() for _ in range(rounds)]
    for one in both:
        one["whole_s"] = one["committed_at"] - one["begun_at"] - one["bare_put_s"]
    names = ("publish_s", "bare_put_s", "sync_s", "bare_get_s", "whole_s")
    medians = {name: statistics.median(one[name] for one in both) for name in names}
    least = {f"{name[:-2]}_least_s": min(one[name] for one in both) for name in names}
    payload_bytes = statistics.median(one["payload_bytes"] for one in both)
    nominal_s = payload_bytes / (rate_mbit * 1e6 / 8)
    fastest = min(both, key=lambda one: one["sync_s"])
    return {
        "rate_mbit": rate_mbit,
        "rounds": rounds,
        "load": os.getloadavg()[0],
        "delta_bytes": payload_bytes,
        "nominal_s": nominal_s,
        **medians,
        **least,
        "sync_over_nominal": medians["sync_s"] / nominal_s,
        "sync_least_over_nominal": least["sync_least_s"] / nominal_s,
        "whole_over_nominal": medians["whole_s"] / nominal_s,
        "bare_get_over_nominal": medians["bare_get_s"] / nominal_s,
        "phases_of_the_fastest_sync_s": fastest["phases_s"],
    }


def main() -> None:
    """Measure and print, or play one role in a namespace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates-mbit", type=int, nargs="+", default=[200, 50, 10])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause-ms", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--store-beside", choices=["trainer", "engine"], default="trainer")
    parser.add_argument("--part-mebibytes", type=int, default=64)
    parser.add_argument("--role", choices=["publishes", "pulls"])
    arguments = parser.parse_args()
    if arguments.role is None:
        print(json.dumps(measure(arguments), indent=1))
        return
    steps = {"publishes": publishes, "pulls": pulls}[arguments.role](arguments)
    for _ in sys.stdin:
        print(json.dumps(next(steps)), flush=True)


if __name__ == "__main__":
    main()
