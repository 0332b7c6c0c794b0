"""What `publish` and `sync` return: frozen, printed as one line, ready for `json.dumps` through `as_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from syncline.errors import PeerLostError
from syncline.sync.accounting import Moved
from syncline.version import Kind


@dataclass(frozen=True, slots=True)
class Notice:
    """What became of telling one deployment.

    Attributes:
        url: which one.
        identity: the version that it was told of: the store's current one.
        error: why it did not take it; None if it did.
    """

    url: str
    identity: str
    error: str | None = None


@dataclass(frozen=True)
class Delivery:
    """What became of a version on a live path.

    Attributes:
        transport: `shared-memory`, `collective` or `memory`.
        version: number of the version.
        committed: engines that hold it now, by name.
        missed: engines that do not, by name, and why.
        moved: bytes and seconds, of the trainer's side and the path alone.
    """

    transport: str
    version: int
    committed: tuple[str, ...]
    missed: Mapping[str, str]
    moved: Moved

    def require(self) -> None:
        """Check that no engine missed the version.

        Raises:
            PeerLostError: one did; names all of them, and says why.
        """
        if self.missed:
            who = "; ".join(f"engine {name!r}: {why}" for name, why in self.missed.items())
            raise PeerLostError(
                f"version {self.version} is in the store and on {len(self.committed)} engines, but not on "
                f"{who}; restart them, they take it with the next version or from the store",
                version=self.version,
            )


@dataclass(frozen=True)
class PublishReport:
    """One published version.

    Attributes:
        version, manifest_sha256: the version's number and identity.
        kind: `full` or `delta`.
        tensors: how many tensors the payload carries.
        changed, total: units (elements, or bytes of sub-byte dtypes) that changed, and of all tensors.
        payload_bytes: bytes of the parts; `full_bytes`: of the weights written out raw.
        anchor: number of the full version that was published right after, with the same weights.
        notices: what became of telling each deployment in `notify`.
        delivery: what became of the version on the publisher's live path; None without one.
        moved: bytes and seconds of bringing it into the store, without an anchor behind it, and without
            the live path, whose own are in `delivery`.
        seconds: by phase (`diff`, `encode`, `put`, `commit`, ...), and `total`.
    """

    version: int
    manifest_sha256: str
    kind: Kind
    tensors: int
    changed: int
    total: int
    payload_bytes: int
    full_bytes: int
    anchor: int | None = None
    notices: tuple[Notice, ...] = ()
    delivery: Delivery | None = None
    moved: Moved | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """Share of the units that changed, 0 to 1."""
        return self.changed / self.total if self.total else 0.0

    def __str__(self) -> str:
        smaller = self.full_bytes / max(1, self.payload_bytes)
        return (
            f"version {self.version} ({self.kind}): {self.changed:,} of {self.total:,} changed "
            f"({self.density:.3%}), {self.payload_bytes:,} bytes, {smaller:.1f} times smaller than full"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, `density` included."""
        return {**asdict(self), "density": self.density}


@dataclass(frozen=True)
class AppliedVersion:
    """The version that an engine holds after `sync`.

    Attributes:
        run_id, version, manifest_sha256: which version it is.
        fingerprint: 32 hex digits, of the whole model.
        applied: numbers of the versions whose payload was applied on the way; empty if none was needed.
        changed: units that were overwritten, over all of them; `payload_bytes`: bytes fetched.
        seconds: by phase (`fetch`, `decode`, `apply`, `verify`, ...), and `total`.
        layout: `syncline`, or the foreign layout that was followed. Of a foreign one, `version` counts what
            the engine has followed, `run_id` is a digest of the version's name, and `manifest_sha256` tells
            its files from others under that name.
        identity: what the publisher of a foreign layout calls the version; None in a run of our own.
        missing: guarantees that the layout, or the directory, did not give; short sentences.
        moved: bytes and seconds, whatever the transport; None if nothing had to be moved on a live path.
    """

    run_id: str
    version: int
    manifest_sha256: str
    fingerprint: str
    applied: tuple[int, ...] = ()
    changed: int = 0
    payload_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    layout: str = "syncline"
    identity: str | None = None
    missing: tuple[str, ...] = ()
    moved: Moved | None = None

    def __str__(self) -> str:
        name = self.version if self.identity is None else self.identity
        if not self.applied:
            return f"version {name}: held already"
        way = ", ".join(str(number) for number in self.applied)
        return f"version {name}: applied {way}, {self.changed:,} changed, {self.payload_bytes:,} bytes fetched"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)
