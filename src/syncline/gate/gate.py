"""Judge each version that an engine commits by what it computes, not by what it holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from syncline.abc import Scorer, Store
from syncline.errors import ConfigError
from syncline.gate.deviation import Deviation, deviation
from syncline.gate.limits import Limits, learn
from syncline.gate.reference import Reference, read_reference
from syncline.gate.report import Committed, GateReport, Verdict

RollBack = Callable[[int], object]
"""Puts an engine back to the version of this number, all of it, and returns when it serves that one.

`lambda version: receiver.sync(version)` is one. It raises if it could not; then the engine holds what the
error says.
"""


GateAction = Literal["flag", "rollback"]


class Gate:
    """Scores an engine after its commits, against the trainer's scores in the store.

    Call `check` after every commit, when the engine answers again. Use one gate for one engine, and a new one
    when the engine is started with other settings: limits are of kernels and dtype, too.

    Args:
        engine: scores by the weights that the engine serves.
        store: where the trainer puts its scores (`publish_scores`).
        limits: from an earlier run of the same engine; None: learn them from the first version whose weights
            are proven.
        every: judge the first version and then one in so many.
        action: what to do with a version above a limit: `flag` says so, `rollback` also puts the last good
            one back.
        wait_s: how long to wait for the trainer's scores, which come after its commit.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        engine: Scorer,
        store: Store,
        *,
        limits: Limits | None = None,
        every: int = 1,
        action: GateAction = "flag",
        wait_s: float = 10.0,
    ) -> None:
        if every < 1:
            raise ConfigError(f"gate: expected every from 1, found {every}")
        if action not in {"flag", "rollback"}:
            raise ConfigError(f"gate: expected the action flag or rollback, found {action!r}")
        if not 0 <= wait_s < float("inf"):
            raise ConfigError(f"gate: expected wait_s from 0, found {wait_s}")
        self._engine = engine
        self._store = store
        self._every = every
        self.action = action
        self._wait_s = wait_s
        self._commits = 0
        self._good: int | None = None
        self._refused: set[str] = set()
        self.limits = limits

    def refuses(self, manifest_sha256: str) -> bool:
        """Tell whether a version was flagged here, so that whoever follows the store passes it over."""
        return manifest_sha256 in self._refused

    def check(
        self,
        committed: Committed,
        roll_back: RollBack | None = None,
        reference: Reference | None = None,
    ) -> GateReport:
        """Judge a version that the engine has just made current; put the last good one back if need be.

        Nothing passes unseen: where there are no limits yet and the weights are not proven, where the trainer
        has no scores of exactly this version, and where it is not this one's turn, the verdict says
        so and is not `passed`.

        Args:
            roll_back: with the action `rollback`: how.
            reference: the trainer's scores; None: those in the store.

        Raises:
            ConfigError: `rollback` without `roll_back`.
            TransportError, FormatError: the engine could not be scored, or the trainer's scores could not be
                read; the version is neither good nor flagged.
            What `roll_back` raises; the version is flagged then, see `refuses`.
        """
        if self.action == "rollback" and roll_back is None:
            raise ConfigError("gate: the action is rollback, so check needs roll_back; found none")
        start_s = time.monotonic()
        report = self._judge(committed, reference)
        if report.is_good:
            self._good = committed.version
        if report.verdict == "flagged":
            self._refused.add(committed.manifest_sha256)
            if roll_back is not None and self.action == "rollback":
                report = self._put_back(report, roll_back)
        return replace(report, seconds=time.monotonic() - start_s)

    def _judge(self, committed: Committed, reference: Reference | None) -> GateReport:
        turn = self._commits
        self._commits += 1
        if turn % self._every and self.limits is not None:
            return GateReport(committed, "skipped", f"one version in {self._every} is scored")
        if self.limits is None and not committed.is_proven:
            return GateReport(
                committed,
                "unjudged",
                "there are no limits yet, and this version cannot give them: it is not proven that "
                "the engine holds its weights bit for bit",
            )
        if reference is None:
            reference = read_reference(self._store, committed.version, wait_s=self._wait_s)
        if reference is None or reference.manifest_sha256 != committed.manifest_sha256:
            what = "no scores" if reference is None else "scores of another version of this number"
            return GateReport(committed, "unjudged", f"the store has {what}")
        return judge(committed, reference, self._engine, self)

    def _put_back(self, report: GateReport, roll_back: RollBack) -> GateReport:
        if self._good is None:
            reason = f"{report.reason}; there is no good version to put back"
            return replace(report, reason=reason)
        roll_back(self._good)
        return replace(report, rolled_back_to=self._good)


def judge(committed: Committed, reference: Reference, engine: Scorer, gate: Gate) -> GateReport:
    """Score the engine and hold it against the gate's limits, or learn them where it has none."""
    scores = engine.score(reference.probes, reference.top)
    found = deviation(reference.probes, reference.scores, scores)
    if gate.limits is None:
        gate.limits = learn(found)
        verdict, reason = _first(gate.limits)
    else:
        verdict, reason = _later(gate.limits, found, committed)
    return GateReport(committed, verdict, reason, engine.name, reference.scorer, found, gate.limits)


def _first(learned: Limits | None) -> tuple[Verdict, str]:
    if learned is not None:
        return "learned", "its weights are proven, so this is what rounding does"
    reason = (
        "its weights are proven, but engine and trainer do not compute the same: caches, derived weights, "
        "quantisation, or another model"
    )
    return "flagged", reason


def _later(limits: Limits, found: Deviation, committed: Committed) -> tuple[Verdict, str]:
    over = limits.exceeded(found)
    if not over:
        return "passed", "every figure is within its limit"
    cause = (
        "; the weights are proven, so look at caches and at what is derived from weights"
        if committed.is_proven
        else ""
    )
    return "flagged", "; ".join(over) + cause
