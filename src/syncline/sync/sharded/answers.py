"""What the leader and the other ranks tell each other, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from syncline.errors import FormatError
from syncline.format import strict_json
from syncline.sync.reports import PublishReport
from syncline.sync.sharded.part import Drift
from syncline.types import ZERO, Fingerprint
from syncline.version import Kind

_LIMIT_BYTES = 1 << 28
PROOF_KEYS = ("layout", "fingerprints", "live")
_START_KEYS = ("run_id", "epoch", "version", "sha256")
_ANSWER_KEYS = ("report", "is_anchor_due", "drift")
_DRIFT_KEYS = ("name", "box", "first", "second")
_REPORT_KEYS = (
    "version",
    "manifest_sha256",
    "kind",
    "tensors",
    "changed",
    "total",
    "payload_bytes",
    "full_bytes",
)


@dataclass(frozen=True, slots=True)
class Start:
    """What ranks know of the store: its run and epoch, and the current version and its digest."""

    run_id: str
    epoch: int
    version: int | None
    sha256: str | None

    @property
    def next_version(self) -> int:
        """Number that the next version gets."""
        return 1 if self.version is None else self.version + 1

    @classmethod
    def load(cls, raw: bytes) -> Start:
        """Read what the leader wrote.

        Raises:
            FormatError: it is not that.
        """
        fields = fields_of(raw, "the leader's start", _START_KEYS)
        version = None if fields["version"] is None else fields.integer("version")
        sha256 = None if fields["sha256"] is None else fields.hexadecimal("sha256", 64)
        return cls(fields.hexadecimal("run_id", 32), fields.integer("epoch"), version, sha256)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a version: the report, or which copies keep it from being committed."""

    report: PublishReport | None
    is_anchor_due: bool = False
    drift: Drift | None = None

    def dump(self) -> bytes:
        """Return the answer as JSON."""
        report = None
        if self.report is not None:
            found = asdict(self.report)
            report = {key: found[key] for key in _REPORT_KEYS}
        drift = None if self.drift is None else asdict(self.drift)
        return strict_json.dump(
            {"report": report, "is_anchor_due": self.is_anchor_due, "drift": drift}
        )

    @classmethod
    def load(cls, raw: bytes) -> Answer:
        """Read what `dump` wrote.

        Raises:
            FormatError: it is not that.
        """
        where = "the leader's answer"
        fields = fields_of(raw, where, _ANSWER_KEYS)
        report, drift = None, None
        if fields["report"] is not None:
            row = strict_json.Fields(fields["report"], where, _REPORT_KEYS, "report")
            sizes = {
                key: row.integer(key)
                for key in _REPORT_KEYS
                if key not in ("manifest_sha256", "kind")
            }
            kind = cast(Kind, row.word("kind", "full", "delta"))
            report = PublishReport(
                manifest_sha256=row.hexadecimal("manifest_sha256", 64),
                kind=kind,
                **sizes,  # type: ignore[arg-type]
            )
        if fields["drift"] is not None:
            row = strict_json.Fields(fields["drift"], where, _DRIFT_KEYS, "drift")
            numbers = (row.integer("box"), row.integer("first"), row.integer("second"))
            drift = Drift(row.text("name"), *numbers)
        return cls(report, fields["is_anchor_due"] is True, drift)

    def require_report(self) -> PublishReport:
        """Return the report of a committed version.

        Raises:
            FormatError: the answer has none.
        """
        if self.report is None:
            raise FormatError("the leader's answer: expected the report of a version, found none")
        return self.report


def proof_message(layout: str, proof: Mapping[str, Fingerprint] | None, live: str | None) -> bytes:
    """Return what a rank tells of its beginning: which layout, what it holds of a version, where engines join."""
    found = (
        None
        if proof is None
        else {name: value.hex() for name, value in proof.items() if value != ZERO}
    )
    return strict_json.dump({"layout": layout, "fingerprints": found, "live": live})


def fields_of(raw: bytes, where: str, keys: tuple[str, ...]) -> strict_json.Fields:
    """Return the members of a message that must have exactly these keys."""
    return strict_json.Fields(strict_json.parse(raw, where, limit_bytes=_LIMIT_BYTES), where, keys)
