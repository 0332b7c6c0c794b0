"""What a publisher asks of the version that it makes the next one on: a copy of it, or marks of changes.

`Snapshot` compares with a copy (the `snapshot` detector); `WatchedBase` knows which units were written (the
`hook` detector). Both give the same windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from syncline.abc import WeightSource
from syncline.sync.phases import Phases
from syncline.types import Bits, DeviceBits, Fingerprint, Record, TensorMeta, Window
from syncline.version import HeldVersion, TensorEntry


class Windows(Protocol):
    """Windows of one tensor, to be iterated once; afterwards, what was found in all of them.

    Attributes:
        changed: units that differ from the base.
        fingerprint: what their changes add to the tensor's fingerprint.
    """

    changed: int
    fingerprint: Fingerprint

    def __iter__(self) -> Iterator[Window]: ...


class Base(Protocol):
    """The version to make the next one on; holds it as an engine does, or is empty at first."""

    def tensors(self) -> Mapping[str, TensorMeta]:
        """Return its tensors; empty if nothing was published or filled in yet."""

    def held(self) -> HeldVersion | None:
        """Return the committed version."""

    def require_held(self) -> HeldVersion:
        """Return the committed version; raise `BaseVersionError` if there is none."""

    def table(self) -> Mapping[str, TensorEntry]:
        """Return tensors and fingerprints, of the committed version or of what was filled in."""

    def fill(self, source: WeightSource) -> Mapping[str, bytes]:
        """Take over every tensor of a source for a first version, and return its further files."""

    def refresh(self, source: WeightSource, phases: Phases) -> Mapping[str, TensorEntry]:
        """Take over the bits of a source for a full version, and return the table that goes with them."""

    def bits(self, name: str) -> Bits:
        """Return the bits that are being published; valid once they were taken over or iterated."""

    def difference(
        self, meta: TensorMeta, bits: Bits | DeviceBits, phases: Phases, units: range
    ) -> Windows:
        """Return what differs in some units of these bits, for a delta; iterated on any thread.

        Args:
            bits: (meta.unit_count,) all bits of the tensor to publish.
            units: whole windows of the tensor, or all of it.
        """

    def confirm(self, meta: TensorMeta, fingerprint: Fingerprint) -> None:
        """Raise if the tensor, all of whose units were iterated, does not have this fingerprint now."""

    def check_unwritten(self) -> None:
        """Raise if `bits` may not be any more what was put into the version that is to be committed."""

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Go on from a version that was just committed; there are no records."""
