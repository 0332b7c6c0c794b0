"""Where the time of moving a version went, in the same words for every transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from syncline.version import Kind

PHASES = (
    "convert",
    "gather",
    "d2h",
    "encode",
    "wire",
    "h2d",
    "decode",
    "apply",
    "reload",
    "flush",
)
"""What every transport tells apart, in the order in which bytes pass through them."""

_OF: Mapping[str, str] = MappingProxyType(
    {
        "convert": "convert",
        "map": "convert",
        "gather": "gather",
        "read": "gather",
        "exchange": "gather",
        "d2h": "d2h",
        "h2d": "h2d",
        "diff": "encode",
        "encode": "encode",
        "spool": "encode",
        "put": "wire",
        "commit": "wire",
        "fetch": "wire",
        "wire": "wire",
        "decode": "decode",
        "verify": "decode",
        "apply": "apply",
        "reload": "reload",
        "flush": "flush",
    }
)
"""Which of them a name that `sync.Phases` charges counts as; `wait` and names not listed are nobody's work."""


@dataclass(frozen=True)
class Moved:
    """What moving one version took, on one side.

    Attributes:
        transport: `store`, `shared-memory`, `collective`, ...
        kind: `full` or `delta`: what travelled, whatever kind the version itself is of.
        replicas: engines that it went to; 1 on an engine's own side.
        wire_bytes: bytes that went over the transport to all of them, manifests included, and everything that
            had to be sent again; a broadcast counts once for each. Only a live path's own few words are left out.
        model_bytes: of the weights when written out raw.
        seconds: for each of `PHASES`, over all threads; 0.0 where there was nothing to do. What only one thread
            does (`apply`, `reload`, `flush`) is never more than `total_s`.
        total_s: from beginning to end.

    Example:
        >>> moved = Moved.of("store", "delta", 1, 10, 1000, {"fetch": 2.0, "decode": 1.0, "total": 2.5})
        >>> moved.seconds["wire"], moved.overlap_s, moved.share
        (2.0, 0.5, 0.01)
    """

    transport: str
    kind: Kind
    replicas: int
    wire_bytes: int
    model_bytes: int
    seconds: Mapping[str, float]
    total_s: float

    @classmethod
    def of(
        cls,
        transport: str,
        kind: Kind,
        replicas: int,
        wire_bytes: int,
        model_bytes: int,
        seconds: Mapping[str, float],
    ) -> Moved:
        """Sum up the seconds of `Phases.seconds()`, `total` among them."""
        found = dict.fromkeys(PHASES, 0.0)
        for name, spent_s in seconds.items():
            if name in _OF:
                found[_OF[name]] += spent_s
        total_s = seconds.get("total", sum(found.values()))
        return cls(transport, kind, replicas, wire_bytes, model_bytes, found, total_s)

    def and_then(self, more: Mapping[str, float], took_s: float) -> Moved:
        """Return the same with phases that came after, by their names in `PHASES`, and the time that they took.

        Example:
            >>> moved = Moved.of("store", "delta", 1, 10, 1000, {"fetch": 2.0, "total": 2.5})
            >>> then = moved.and_then({"flush": 0.5}, 1.0)
            >>> then.seconds["wire"], then.seconds["flush"], then.total_s
            (2.0, 0.5, 3.5)
        """
        seconds = {name: spent_s + more.get(name, 0.0) for name, spent_s in self.seconds.items()}
        return replace(self, seconds=seconds, total_s=self.total_s + took_s)

    @classmethod
    def together(cls, parts: Sequence[Moved], total_s: float) -> Moved:
        """Sum up what several engines, or ranks of one, say of the same version; there is at least one."""
        first = parts[0]
        seconds = {name: sum(part.seconds[name] for part in parts) for name in PHASES}
        return replace(
            first,
            kind="full" if any(part.kind == "full" for part in parts) else "delta",
            replicas=len(parts),
            wire_bytes=sum(part.wire_bytes for part in parts),
            seconds=seconds,
            total_s=total_s,
        )

    @property
    def busy_s(self) -> float:
        """Seconds of work, over all threads."""
        return sum(self.seconds.values())

    @property
    def overlap_s(self) -> float:
        """Seconds of work that went on beside other work."""
        return max(0.0, self.busy_s - self.total_s)

    @property
    def share(self) -> float:
        """Bytes on the wire for each byte of the model and replica."""
        whole_bytes = self.model_bytes * self.replicas
        return self.wire_bytes / whole_bytes if whole_bytes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, `busy_s`, `overlap_s` and `share` included."""
        sums = {"busy_s": self.busy_s, "overlap_s": self.overlap_s, "share": self.share}
        return {**asdict(self), **sums}
