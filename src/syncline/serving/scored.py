"""An engine that is judged after every version that it takes, before that counts as taken."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from syncline.abc import Store
from syncline.errors import VerifyError
from syncline.gate import Committed, Gate, GateReport
from syncline.serving.puller import Puller
from syncline.sync.layout import own_history
from syncline.version import HeldVersion

_log = logging.getLogger(__name__)


class ScoredPuller:
    """A `Puller` behind a gate: a flagged version is logged, or put back and refused from then on.

    Args:
        puller: proves, before it says that it holds a version, that every worker has its bits.
        store: where the versions come from.
        gate: scores what the puller serves; its action says what becomes of a flagged version.
        limits: file that the limits are written to when they are learned; None: nowhere.
    """

    def __init__(
        self, puller: Puller, store: Store, gate: Gate, limits: Path | None = None
    ) -> None:
        self._puller = puller
        self._store = store
        self._gate = gate
        self._limits = limits
        self._last: GateReport | None = None

    def sync(self, version: int | None, *, repair: bool = False) -> object:
        """Bring it to a version and judge it.

        Raises:
            VerifyError: the version was flagged, and the last good one put back, now or earlier.
            What the puller and the gate raise; after an error of scoring the version is held, and not judged.
        """
        target = own_history(self._store).target(version)
        puts_back = self._gate.action == "rollback"
        if puts_back and self._gate.refuses(target.sha256) and not repair:
            raise VerifyError(
                f"version {target.version} was flagged by the gate and put back; publish another one",
                version=target.version,
            )
        done = self._puller.sync(target.version, repair=repair)
        self._judge(Committed(target.version, target.sha256, is_proven=True))
        return done

    def _judge(self, committed: Committed) -> None:
        had_limits = self._gate.limits is not None
        report = self._last = self._gate.check(committed, self._puller.sync)
        _log.log(
            logging.INFO if report.verdict != "flagged" else logging.WARNING, "gate: %s", report
        )
        if self._limits is not None and not had_limits and report.limits is not None:
            self._limits.write_bytes(report.limits.dump())
        if report.rolled_back_to is not None:
            raise VerifyError(f"the gate: {report}", version=committed.version)

    def held(self) -> HeldVersion | None:
        """See `Puller.held`."""
        return self._puller.held()

    def is_serving(self) -> bool:
        """See `Puller.is_serving`."""
        return self._puller.is_serving()

    def figures(self) -> Mapping[str, float]:
        """Return the puller's figures, and those of the last verdict."""
        report = self._last
        if report is None:
            return self._puller.figures()
        own = {"syncline_gate_is_flagged": float(report.verdict == "flagged")}
        if report.deviation is not None:
            own |= {
                "syncline_gate_max_difference_nats": report.deviation.max_difference,
                "syncline_gate_mean_difference_nats": report.deviation.mean_difference,
                "syncline_gate_kl_nats": report.deviation.kl,
                "syncline_gate_seconds": report.seconds,
            }
        return {**self._puller.figures(), **own}
