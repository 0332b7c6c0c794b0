"""`LIVE.json`: where the run's publisher waits for engines, if it does; no part of any version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from syncline.format import names, strict_json

_FORMAT = "syncline-live-path"
_KEYS = ("format", "format_version", "run_id", "epoch", "transport", "address")
_LIMIT_BYTES = 1 << 16

LiveTransport = Literal["shared-memory", "collective"]


@dataclass(frozen=True, slots=True)
class LivePath:
    """A publisher's live path.

    Attributes:
        run_id, epoch: of the publisher, as in `HEAD.json`.
        transport: None: there is no live path; the engines pull from the store.
        address: what an inlet joins at: a path, or `host:port`; None where there is no live path.
    """

    run_id: str
    epoch: int
    transport: LiveTransport | None
    address: str | None


def dump(path: LivePath) -> bytes:
    """Return the canonical bytes of `LIVE.json`; `load` gives the path back."""
    return strict_json.dump(
        {
            "format": _FORMAT,
            "format_version": names.FORMAT_VERSION,
            "run_id": path.run_id,
            "epoch": path.epoch,
            "transport": path.transport,
            "address": path.address,
        }
    )


def load(data: bytes, where: str = names.LIVE) -> LivePath:
    """Return the live path that these bytes stand for.

    Raises:
        FormatError: anything that `docs/reference/format.md`, section 2, does not allow.

    Example:
        >>> load(dump(LivePath("0" * 32, 1, None, None))).transport is None
        True
    """
    fields = strict_json.document(data, where, _FORMAT, _KEYS, limit_bytes=_LIMIT_BYTES)
    run_id, epoch = fields.hexadecimal("run_id", 32), fields.integer("epoch", minimum=1)
    if fields["transport"] is None and fields["address"] is None:
        return LivePath(run_id, epoch, None, None)
    name = fields.word("transport", "shared-memory", "collective")
    transport: LiveTransport = "shared-memory" if name == "shared-memory" else "collective"
    return LivePath(run_id, epoch, transport, fields.text("address"))
