"""What the gate found of one version: frozen, printable, ready for `json.dumps` through `as_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from syncline.gate.deviation import Deviation
from syncline.gate.limits import Limits

Verdict = Literal["learned", "passed", "flagged", "unjudged", "skipped"]

VERDICTS: Mapping[Verdict, str] = MappingProxyType(
    {
        "learned": "the limits were taken from this version, whose weights are proven",
        "passed": "every figure is within its limit",
        "flagged": "a figure is above its limit, or is no number",
        "unjudged": "it could not be judged: no limits, or no scores of the trainer's",
        "skipped": "not its turn: one in so many is scored",
    }
)
"""What each verdict means. Only the first two say that the engine computes what the trainer does."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A version that an engine has just made current.

    Attributes:
        version, manifest_sha256: which one.
        is_proven: the fingerprint of what lies in the memory of every worker is the manifest's. Say so only
            if it was computed from that memory after the last write.
    """

    version: int
    manifest_sha256: str
    is_proven: bool


@dataclass(frozen=True)
class GateReport:
    """The verdict on one version, and what it rests on.

    Attributes:
        committed: the version.
        verdict: see `VERDICTS`.
        reason: why, in one sentence.
        engine, trainer: what scored, in words; None where nothing was scored.
        deviation: the figures; None where nothing was compared.
        limits: what they were held against, or what was learned.
        rolled_back_to: the version that the engine was put back to; None if it was not.
        seconds: that the whole check took.
    """

    committed: Committed
    verdict: Verdict
    reason: str
    engine: str | None = None
    trainer: str | None = None
    deviation: Deviation | None = None
    limits: Limits | None = None
    rolled_back_to: int | None = None
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """The engine was scored and computes what the trainer does."""
        return self.verdict in {"learned", "passed"}

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, `is_good` included."""
        return {**asdict(self), "is_good": self.is_good}

    def __str__(self) -> str:
        figures = ""
        if self.deviation is not None:
            found = self.deviation
            figures = (
                f"; difference max {found.max_difference:.3g} mean {found.mean_difference:.3g} nats, "
                f"KL {found.kl:.3g} over {found.positions} tokens"
            )
        back = "" if self.rolled_back_to is None else f"; put back to {self.rolled_back_to}"
        return f"version {self.committed.version} {self.verdict}: {self.reason}{figures}{back}"
