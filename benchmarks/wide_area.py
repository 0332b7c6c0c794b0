"""How long does a delta take over a slow, long link, against its bytes at the link's rate, and against a full version?

Two network namespaces with a veth pair between them; Linux's token bucket (`tc tbf`) holds each direction to a rate. In
one lies an S3 server with a full version and as many deltas as there are rates, in the other an engine pulls: the full version at
the first rate, then one delta at each rate. In the same run obstore alone moves the delta's objects over the same link. There is no netem in every kernel, so the long
way is a pause before each answer of the server: one round trip per request. Needs root, iproute2 and moto.

Prints JSON. `delta_over_nominal` is sync time / (payload / rate); `delta_over_bare` is sync time / obstore's time.
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


def in_namespace(name: str, role: str, arguments: argparse.Namespace, endpoint: str) -> dict:
    """Run this script in a namespace with a role; return what it prints."""
    done = subprocess.run(
        ["ip", "netns", "exec", name, sys.executable, __file__, "--role", role, "--share",
         str(arguments.share), "--megabytes", str(arguments.megabytes),
         "--part-mebibytes", str(arguments.part_mebibytes), "--rounds", str(arguments.rounds),
         "--rates-mbit", *map(str, arguments.rates_mbit)],
        env={**os.environ, **environment(endpoint), "ENDPOINT": endpoint},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    return json.loads(done.stdout)


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


def publish(arguments: argparse.Namespace) -> dict:
    """Publish a full version and a delta, beside the server, off the link."""
    import syncline

    source = source_of(arguments.megabytes)
    publisher = syncline.Publisher(
        syncline.open_store(f"s3://bucket/{PREFIX}"),
        part_bytes=arguments.part_mebibytes << 20,
        anchor_every=None,
    )
    publisher.publish(source)
    publishes_s = []
    for _ in range(len(arguments.rates_mbit) * arguments.rounds):
        source.step(arguments.share)
        report, seconds = timed(lambda: publisher.publish(source))
        publishes_s.append(seconds)
    return {"model_bytes": report.full_bytes, "publish_delta_s": statistics.median(publishes_s)}


def pull(arguments: argparse.Namespace) -> dict:
    """Pull the full version, then a delta at each rate, and its objects with obstore alone."""
    import obstore

    import syncline

    receiver = syncline.Receiver(
        syncline.open_store(f"s3://bucket/{PREFIX}"), syncline.MemoryEngine()
    )
    service = s3_service(os.environ["ENDPOINT"], PREFIX)
    full, full_s = timed(lambda: receiver.sync(1))
    rate_bytes_per_s = arguments.rates_mbit[0] * 1e6 / 8

    def round_at(version: int) -> tuple[int, float, float, dict[str, float]]:
        """Sync to a version, then get its parts with obstore alone."""
        delta, delta_s = timed(lambda: receiver.sync(version))
        listed = obstore.list(service, f"weight_v{version:06d}")
        keys = [meta["path"] for batch in listed for meta in batch]
        parts = [key for key in keys if key.endswith(".safetensors")]
        _, bare_s = timed(lambda: [obstore.get(service, key).bytes() for key in parts])
        return delta.payload_bytes, delta_s, bare_s, delta.seconds

    rows = []
    for number, rate_mbit in enumerate(arguments.rates_mbit):
        hold_to(SERVER, "far", rate_mbit, "change")
        first = 2 + number * arguments.rounds
        rounds = [round_at(version) for version in range(first, first + arguments.rounds)]
        sizes, deltas_s, bares_s, phases = zip(*rounds, strict=True)
        nominal_s = statistics.median(sizes) / (rate_mbit * 1e6 / 8)
        delta_s, bare_s = statistics.median(deltas_s), statistics.median(bares_s)
        rows.append(
            {
                "rate_mbit": rate_mbit,
                "rounds": arguments.rounds,
                "delta_bytes": statistics.median(sizes),
                "nominal_s": nominal_s,
                "delta_s": delta_s,
                "delta_least_s": min(deltas_s),
                "bare_s": bare_s,
                "bare_least_s": min(bares_s),
                "delta_over_nominal": delta_s / nominal_s,
                "bare_over_nominal": bare_s / nominal_s,
                "delta_over_bare": delta_s / bare_s,
                "full_nominal_over_delta": full.payload_bytes / (rate_mbit * 1e6 / 8) / delta_s,
                "phases_of_the_fastest_s": phases[deltas_s.index(min(deltas_s))],
            }
        )
    return {
        "full_s": full_s,
        "full_bytes": full.payload_bytes,
        "full_over_nominal": full_s / (full.payload_bytes / rate_bytes_per_s),
        "deltas": rows,
    }


def timed(job):  # noqa: ANN001, ANN201
    """Return what a job returns and the seconds it took."""
    start_s = time.perf_counter()
    result = job()
    return result, time.perf_counter() - start_s


def measure(arguments: argparse.Namespace) -> dict:
    """Make the link, publish, pull, and return the figures."""
    with (
        namespaces(arguments.rates_mbit[0]),
        S3Server(namespace=SERVER, host=SERVER_IP, pause_ms=arguments.pause_ms) as server,
    ):
        subprocess.run(
            ["ip", "netns", "exec", SERVER, sys.executable, "-c",
             f"import urllib.request as r; r.urlopen(r.Request('{server.url}/bucket', b'', method='PUT'))"],
            check=True,
        )  # fmt: skip
        published = in_namespace(SERVER, "publish", arguments, server.url)
        pulled = in_namespace(CLIENT, "pull", arguments, server.url)
    return {
        **machine("obstore", "moto"),
        "pause_ms": arguments.pause_ms,
        "share": arguments.share,
        "part_mebibytes": arguments.part_mebibytes,
        **published,
        **pulled,
    }


def main() -> None:
    """Measure and print, or play one role in a namespace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates-mbit", type=int, nargs="+", default=[200, 50, 10])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause-ms", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument(
        "--part-mebibytes", type=int, default=64
    )  # while one is decoded, the next comes
    parser.add_argument("--role", choices=["publish", "pull"])
    arguments = parser.parse_args()
    roles = {"publish": publish, "pull": pull, None: measure}
    print(json.dumps(roles[arguments.role](arguments), indent=1))


if __name__ == "__main__":
    main()
