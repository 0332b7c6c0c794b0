"""What a deployment says of its replicas, strictly read where Syncline relies on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.errors import FormatError
from syncline.format import strict_json

LIMIT_BYTES = 8 << 20
"""Largest answer that is read: a line for each of some ten thousand replicas."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as it answers `GET`.

    Attributes:
        readiness: it serves `identity`, all of it, and is neither loading nor stuck.
        identity: `current_snapshot_identity`: what it serves; None for nothing yet.
        reason: `readiness_reason`: why it is not ready; None if it is.
        stage: `loading_state.stage`: `loading`, `done`, `error`, or a word of another server's; None
            where a server says none.
        name: which replica; None where a server says none.
    """

    readiness: bool
    identity: str | None
    reason: str | None = None
    stage: str | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the members under their names on the wire."""
        return {
            "replica": self.name,
            "readiness": self.readiness,
            "current_snapshot_identity": self.identity,
            "readiness_reason": self.reason,
            "loading_state": {"stage": self.stage},
        }


def parse(raw: bytes, where: str) -> tuple[ReplicaStatus, ...]:
    """Return the replicas in an answer; members that Syncline does not know are let through.

    Raises:
        FormatError: not JSON, no list `replicas`, or a member of another type than the API says.

    Example:
        >>> parse(b'{"replicas": [{"readiness": true, "current_snapshot_identity": "7"}]}', "answer")
        (ReplicaStatus(readiness=True, identity='7', reason=None, stage=None, name=None),)
    """
    document = strict_json.members(strict_json.parse(raw, where, limit_bytes=LIMIT_BYTES), where)
    if "replicas" not in document:
        raise FormatError(f"{where}: replicas is missing; found {sorted(document)!r:.200}")
    replicas = strict_json.items(document["replicas"], f"{where}: replicas")
    return tuple(
        _replica(value, f"{where}: replicas[{index}]") for index, value in enumerate(replicas)
    )


def ready_at(replicas: Sequence[ReplicaStatus], identity: str) -> int:
    """Return how many replicas are ready at this identity."""
    return sum(replica.readiness and replica.identity == identity for replica in replicas)


def _replica(value: object, where: str) -> ReplicaStatus:
    members = strict_json.members(value, where)
    readiness = members.get("readiness", False)
    if not isinstance(readiness, bool):
        raise FormatError(f"{where}.readiness must be true or false, found {readiness!r:.80}")
    state = members.get("loading_state")
    stage = None
    if state is not None:
        stage = _text(strict_json.members(state, f"{where}.loading_state"), "stage", where)
    return ReplicaStatus(
        readiness,
        _text(members, "current_snapshot_identity", where),
        _text(members, "readiness_reason", where),
        stage,
        _text(members, "replica", where),
    )


def _text(members: Mapping[str, Any], key: str, where: str) -> str | None:
    value = members.get(key)
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{where}.{key} must be a string or null, found {value!r:.80}")
    return value
