"""How fast are reads of a peer's memory, against the bare transport that they go over, in the same run?

A child process has the bytes in registered memory; this one reads all of them into registered memory, by turns through
Syncline (`PeerMemory.read`, with the look at the generation) and through the engine's own calls: Mooncake's
`batch_transfer_sync_read` over TCP, NIXL's `initialize_xfer` over `cma` or TCP, a bare socket, a bare copy out of
shared pages. Loopback, JSON. Mooncake and NIXL run in the environment of `make peers-env`:

    .venvs/peers/bin/python benchmarks/peers.py --mib 512
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from syncline.errors import TransportUnavailableError
from syncline.peers import SharedPeer, TcpPeer
from syncline.peers.generation import HEADER_BYTES, Checked, Header
from syncline.peers.regions import load
from syncline.types import Read

KINDS = ("shared", "tcp", "mooncake", "nixl-tcp", "nixl-cma")
BUCKETS = 16


def open_kind(kind: str) -> Any:
    """Return peer memory of a kind, as the table of kinds makes it."""
    if kind == "shared":
        return SharedPeer()
    if kind == "tcp":
        return TcpPeer()
    if kind == "mooncake":
        from syncline.peers.mooncake import MooncakePeer

        return MooncakePeer(accepts_open_ports=True)
    from syncline.peers.nixl import NixlPeer

    return NixlPeer(transports="cma,self,tcp,posix" if kind == "nixl-cma" else "tcp,self")


def memory_of(peer: Any, nbytes: int) -> np.ndarray:
    """Return memory that a peer can register."""
    return peer.allocate(nbytes) if isinstance(peer, SharedPeer) else np.zeros(nbytes, np.uint8)


def serve(kind: str, nbytes: int) -> None:
    """Be the child: register, say where, and answer a bare socket's one-byte requests with all bytes."""
    peer = open_kind(kind)
    source, header = memory_of(peer, nbytes), Header(memory_of(peer, HEADER_BYTES))
    source[:] = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    header.settle()
    peer.register("source", source)
    peer.register("header", header.memory)
    listening = socket.create_server(("127.0.0.1", 0))
    said = {"described": peer.describe().decode(), "port": listening.getsockname()[1]}
    print("@" + json.dumps(said | {"sum": int(source.view("<u8").sum())}), flush=True)
    connection, _ = listening.accept()
    while connection.recv(1):
        connection.sendall(source.data)


def bare(  # noqa: C901 - one branch for each transport
    kind: str, peer: Any, described: bytes, place: np.ndarray, port: int
) -> Callable[[], None]:
    """Return one read of everything by the transport's own means, nothing around it."""
    size = place.size // BUCKETS
    if kind in ("shared", "tcp"):
        if kind == "shared":
            row = json.loads(described)["regions"]["source"]
            pages = next(
                m
                for k, m in peer._mapped.items()  # noqa: SLF001
                if k[2] == str(row[2])
            )[row[3] :]
            return lambda: np.copyto(place, pages[: place.size])
        connection = socket.create_connection(("127.0.0.1", port))

        def stream() -> None:
            connection.sendall(b"x")
            view, got = memoryview(place), 0
            while got < place.size:
                got += connection.recv_into(view[got:], min(place.size - got, 1 << 22))

        return stream
    here = int(place.ctypes.data)
    if kind == "mooncake":
        row = load(described, "mooncake", ("target",), 1)
        target, there = row.fields["target"], row.regions["source"][1]
        engine = peer._engine  # noqa: SLF001

        def batch() -> None:
            for n in range(BUCKETS):
                if engine.batch_transfer_sync_read(
                    target, [here + n * size], [there + n * size], [size]
                ):
                    raise SystemExit("Mooncake failed")

        return batch
    found = load(described, "nixl", ("agent", "name"), 1)
    agent, there = peer._agent, found.regions["source"][1]  # noqa: SLF001

    def transfer() -> None:
        for n in range(BUCKETS):
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([(here + n * size, size, 0)], "DRAM"),
                agent.get_xfer_descs([(there + n * size, size, 0)], "DRAM"),
                found.fields["name"],
            )
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            if state != "DONE":
                raise SystemExit(f"NIXL ended as {state}")

    return transfer


def measure(kind: str, nbytes: int, rounds: int) -> dict[str, Any]:
    """Return seconds of both ways, by turns."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", kind, "--mib", str(nbytes >> 20)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        said = next(json.loads(line[1:]) for line in child.stdout or () if line.startswith("@"))
        peer, described = open_kind(kind), said["described"].encode()
        place = memory_of(peer, nbytes)
        peer.register("place", place)
        checked = Checked(peer, lambda n: memory_of(peer, n), "look")
        size = nbytes // BUCKETS

        def ours() -> None:
            for n in range(BUCKETS):
                read = Read("source", n * size, "place", n * size, size)
                checked.read(described, "header", 2, [read], 600.0)

        ours()  # first touch of the place, and the connection
        ways = {"syncline": ours, "bare": bare(kind, peer, described, place, said["port"])}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                place[:: 1 << 12] = 0
                begun = time.perf_counter()
                way()
                if turn:  # the first of each is not counted
                    seconds[name].append(time.perf_counter() - begun)
                if int(place.view("<u8").sum()) != said["sum"]:
                    raise SystemExit(f"{kind}: {name} read other bytes")
        pairs = zip(seconds["bare"], seconds["syncline"], strict=True)
        return {
            "gb_per_s": {n: nbytes / statistics.median(s) / 1e9 for n, s in seconds.items()},
            "seconds": seconds,
            "share_of_bare": statistics.median(b / s for b, s in pairs),
        }
    finally:
        child.kill()
        child.wait()


def main() -> None:
    """Measure every kind that is there, each in a process of its own, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--serve", choices=KINDS)
    parser.add_argument("--only", choices=KINDS)
    arguments = parser.parse_args()
    nbytes = arguments.mib << 20
    if arguments.serve is not None:
        serve(arguments.serve, nbytes)
        return
    if arguments.only is not None:
        try:
            print("@" + json.dumps(measure(arguments.only, nbytes, arguments.rounds)), flush=True)
        except TransportUnavailableError as error:
            print("@" + json.dumps({"skipped": str(error)}), flush=True)
        os._exit(0)  # Mooncake's threads take seconds to end
    results: dict[str, Any] = {
        "mib": arguments.mib,
        "rounds": arguments.rounds,
        "cores": os.cpu_count(),
    }
    for kind in arguments.kinds.split(","):
        done = subprocess.run(
            [
                sys.executable,
                __file__,
                "--only",
                kind,
                "--mib",
                f"{arguments.mib}",
                "--rounds",
                f"{arguments.rounds}",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        found = [line[1:] for line in done.stdout.splitlines() if line.startswith("@")]
        results[kind] = json.loads(found[-1]) if found else {"failed": done.stderr[-500:]}
    results["load"] = os.getloadavg()[0]
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
