"""What the parameter server and its workers say to each other: one strict JSON object a message."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from typing import Any

from syncline.abc import Channel
from syncline.errors import FormatError
from syncline.format import strict_json
from syncline.sync.accounting import Moved
from syncline.version import HeldVersion

_LIMIT_BYTES = 1 << 28
_WHERE = "message of an update"


def say(
    channel: Channel, update: str, word: str, *, timeout_s: float | None = None, **fields: Any
) -> None:
    """Send a message that belongs to an update; raises as `Channel.send`."""
    raw = strict_json.dump({"update": update, "say": word, "with": fields})
    channel.send(raw, timeout_s=timeout_s)


def parse(raw: bytes) -> tuple[str, str, Mapping[str, Any]]:
    """Return update, word and fields of a message; their types are checked where they are used.

    Raises:
        FormatError: it is no such message.
    """
    value = strict_json.parse(raw, _WHERE, limit_bytes=_LIMIT_BYTES)
    fields = strict_json.Fields(value, _WHERE, ("update", "say", "with"))
    return fields.text("update"), fields.text("say"), strict_json.members(fields["with"], _WHERE)


def number(fields: Mapping[str, Any], key: str) -> int:
    """Return a count or size that a message carries."""
    return strict_json.integer(fields.get(key), f"{_WHERE}: {key}")


def microseconds(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return seconds by phase as a message carries them, in whole microseconds."""
    return {name: round(1e6 * spent_s) for name, spent_s in seconds.items()}


def seconds(fields: Mapping[str, Any], key: str) -> dict[str, float]:
    """Return seconds by phase that a message carries in microseconds."""
    spent = strict_json.members(fields.get(key), f"{_WHERE}: {key}")
    return {name: 1e-6 * number(spent, name) for name in spent}


def moved(
    said: Collection[Mapping[str, Any]], held: HeldVersion, catalog_bytes: int, total_s: float
) -> Moved:
    """Sum up what the workers say that it took, and the catalogs that the server read."""
    spent: dict[str, float] = {}
    for fields in said:
        for name, spent_s in seconds(fields, "spent_us").items():
            spent[name] = spent.get(name, 0.0) + spent_s
    wire_bytes = catalog_bytes + sum(number(fields, "wire_bytes") for fields in said)
    spent["total"] = total_s
    return Moved.of("peers", "full", len(said), wire_bytes, held.manifest.model_bytes, spent)


def text(fields: Mapping[str, Any], key: str) -> str:
    """Return a string that a message carries."""
    value = fields.get(key)
    if not isinstance(value, str):
        raise FormatError(f"{_WHERE}: {key} must be a string, found {value!r:.80}")
    return value


def blobs(fields: Mapping[str, Any], key: str) -> list[bytes]:
    """Return a list of bytes that a message carries as base64."""
    try:
        return [base64.b64decode(text, validate=True) for text in texts(fields, key)]
    except ValueError as error:
        raise FormatError(f"{_WHERE}: {key} must be base64: {error}") from error


def texts(fields: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of strings that a message carries."""
    values = strict_json.items(fields.get(key), f"{_WHERE}: {key}")
    if not all(isinstance(value, str) for value in values):
        raise FormatError(f"{_WHERE}: {key} must hold strings")
    return [str(value) for value in values]
