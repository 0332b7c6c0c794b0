"""What the demo reads out of an SGLang rank at the end: every weight that generates.

A function for `--custom-weight-loader`. It knows SGLang's own modules and nothing of where Syncline wrote. SGLang drops
what a loader returns, so the digests are left in the staging directory; an error ends the server, and with it the demo.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from syncline import config
from syncline.demo.fused import parameters, parts
from syncline.demo.identity import sha256_by_name
from syncline.errors import LayoutError

LOADER = "syncline.demo.sglang_worker.leave_digests"
_FILE = "digests.json"


def leave_digests(model: Any, _: object) -> None:
    """Write the SHA-256 of every weight, by its name in the checkpoint, into the staging directory.

    The server must have one rank. The signature is SGLang's.
    """
    found = sha256_by_name(_weights(model))
    (Path(config.sglang_staging()) / _FILE).write_text(json.dumps(found))


def read_digests(staging: Path) -> dict[str, str]:
    """Return what `leave_digests` wrote.

    Raises:
        LayoutError: nothing; the server was not started with it.
    """
    path = staging / _FILE
    if not path.exists():
        raise LayoutError(f"expected the digests of SGLang's weights in {path}, found none")
    found: dict[str, str] = json.loads(path.read_text())
    path.unlink()
    return found


def _weights(model: Any) -> Iterator[tuple[str, Any]]:
    for name, weight, layer in parameters(model):
        at = 0
        for part, rows in parts(name, weight, layer):
            yield part, weight[at : at + rows]
            at += rows
