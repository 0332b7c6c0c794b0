"""What the workers say of the bytes and seconds of a version, and what that comes to."""

from __future__ import annotations

from typing import Any

from syncline.sync.accounting import PHASES, Moved
from syncline.version import Kind
from syncline.vllm.control import Answers


def told(moved: Moved | None, apply_s: float) -> dict[str, Any] | None:
    """Return what a worker's answer says, in plain values; None before it has staged anything.

    Args:
        apply_s: of its last write into the live weights.
    """
    if moved is None:
        return None
    return {
        "kind": moved.kind,
        "wire_bytes": moved.wire_bytes,
        "model_bytes": moved.model_bytes,
        "seconds": {**moved.seconds, "apply": moved.seconds["apply"] + apply_s},
    }


def heard(answers: Answers, flush_s: float, total_s: float) -> Moved | None:
    """Sum up all workers' answers; None if one says nothing."""
    parts = [_part(answer.get("moved")) for answer in answers]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return Moved.together(known, total_s).and_then({"flush": flush_s}, 0.0)


def _part(said: Any) -> Moved | None:
    """Return one worker's figures; None where they are not what `told` makes."""
    if not isinstance(said, dict):
        return None
    numbers = [said.get("wire_bytes"), said.get("model_bytes")]
    seconds = said.get("seconds")
    if not isinstance(seconds, dict) or not all(isinstance(n, int) for n in numbers):
        return None
    if not all(isinstance(seconds.get(name), int | float) for name in PHASES):
        return None
    kind: Kind = "full" if said.get("kind") == "full" else "delta"
    spent = {name: float(seconds[name]) for name in PHASES}
    return Moved.of("store", kind, 1, int(said["wire_bytes"]), int(said["model_bytes"]), spent)
