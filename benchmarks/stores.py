"""How much of what obstore moves bare does a Syncline store move, for the same objects over the same server?

Three objects of a size go up and come down, by turns with obstore alone and through the store, and the medians are
compared. Bare puts overwrite: one request, or a multipart upload. The store's puts create: up to 128 MiB in one request, from memory;
what is larger is copied by the service to its own key afterwards, so that two publishers cannot overwrite each other, and the
server pays for that. Bare gets are one request, read whole or as a stream, and `get_ranges` of neighbouring ranges; the fastest is the
roof. One more object of each size goes first, from which the store learns how many requests at once pay.

The server is moto's, or with --ceph Ceph's RADOS gateway, which has no conditions that hold: puts wait for a lease there. Prints
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "src")]

import obstore  # noqa: E402
from machine import machine  # noqa: E402

from s3_server import S3Server, s3_service  # noqa: E402
from syncline.stores import ObjectStore  # noqa: E402
from syncline.stores.streams import CHUNK_BYTES, PIECE_BYTES  # noqa: E402


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ceph", action="store_true")
    arguments = parser.parse_args()
    with endpoint(is_ceph=arguments.ceph) as url:
        rows = [measured(url, size << 20, arguments.rounds) for size in arguments.megabytes]
    print(
        json.dumps(
            {
                **machine("obstore", "moto"),
                "is_ceph": arguments.ceph,
                "load": os.getloadavg()[0],
                "rows": rows,
            },
            indent=1,
        )
    )


@contextmanager
def endpoint(*, is_ceph: bool) -> Iterator[str]:
    """The server to measure against, with an empty bucket."""
    if is_ceph:
        from ceph_gateway import CephGateway

        with CephGateway() as gateway:
            gateway.make_bucket("bucket")
            yield gateway.url
        return
    with S3Server() as server:
        server.make_bucket("bucket")
        yield server.url


def measured(url: str, size_bytes: int, rounds: int) -> dict[str, float]:
    """Return the medians and ratios for objects of one size."""
    service = s3_service(url, f"bench-{secrets.token_hex(4)}")
    store = ObjectStore(service)
    store.put("warm", [b"up"])
    content = secrets.token_bytes(size_bytes)
    chunks = [content[at : at + (1 << 20)] for at in range(0, size_bytes, 1 << 20)]
    starts = list(range(0, size_bytes, PIECE_BYTES))
    seconds: dict[str, list[float]] = {}

    def run(name: str, job: Callable[[], object]) -> None:
        start_s = time.perf_counter()
        job()
        seconds.setdefault(name, []).append(time.perf_counter() - start_s)

    for number in range(-1, rounds):
        if number == 0:
            seconds.clear()
        bare, ours = f"bare-{number}", f"ours-{number}"
        run("put_bare", lambda key=bare: obstore.put(service, key, content, chunk_size=PIECE_BYTES))
        run("put_ours", lambda key=ours: store.put(key, chunks))
        run("get_bare_one", lambda key=bare: obstore.get(service, key).bytes())
        run("get_bare_ranges", lambda key=bare: obstore.get_ranges(
            service, key, starts=starts, lengths=[PIECE_BYTES] * len(starts), coalesce=0))  # fmt: skip
        run(
            "get_bare_stream",
            lambda key=bare: sum(map(len, obstore.get(service, key).stream(CHUNK_BYTES))),
        )
        run("get_ours", lambda key=bare: sum(map(len, store.pieces(key, size_bytes))))
        for key in (bare, ours):
            store.delete(key)
    medians = {f"{name}_s": statistics.median(times) for name, times in seconds.items()}
    roof_s = min(medians[f"get_bare_{way}_s"] for way in ("one", "ranges", "stream"))
    return {
        "bytes": size_bytes,
        **medians,
        "put_share_of_bare": medians["put_bare_s"] / medians["put_ours_s"],
        "get_share_of_roof": roof_s / medians["get_ours_s"],
    }


if __name__ == "__main__":
    main()
