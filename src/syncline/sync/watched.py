"""The `hook` detector's side of publishing: the base is what the weights hold, but for dirty units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from types import MappingProxyType
from typing import NoReturn

from syncline import kernels
from syncline.abc import WeightSource
from syncline.errors import BaseVersionError, LayoutError
from syncline.sources import WatchedWeights
from syncline.sync.checks import check_complete, check_tensor
from syncline.sync.fingerprints import fingerprints
from syncline.sync.phases import Phases
from syncline.types import WINDOW_UNITS, ZERO, Bits, Fingerprint, Record, TensorMeta, Window
from syncline.version import HeldVersion, TensorEntry


class WatchedBase:
    """Knows the current version without a copy of it, through weights whose writes were seen.

    Args:
        held: the current version; None if there is none yet.
    """

    def __init__(self, weights: WatchedWeights, held: HeldVersion | None) -> None:
        self._weights = weights
        self._held = held
        self._filled: dict[str, TensorEntry] = {}
        self._proofs: dict[str, Proof] = {}

    def tensors(self) -> Mapping[str, TensorMeta]:
        """Return the tensors of the current version; empty if there is none."""
        return MappingProxyType({name: entry.meta for name, entry in self.table().items()})

    def held(self) -> HeldVersion | None:
        """Return the current version."""
        return self._held

    def require_held(self) -> HeldVersion:
        """Return the current version.

        Raises:
            BaseVersionError: there is none.
        """
        if self._held is None:
            raise BaseVersionError("there is no version to make a delta on; publish a full one")
        return self._held

    def table(self) -> Mapping[str, TensorEntry]:
        """Return tensors and fingerprints: of the current version, or of what is to become the first."""
        return self._filled if self._held is None else self._held.manifest.by_name

    def fill(self, source: WeightSource) -> Mapping[str, bytes]:
        """Begin with the weights as they are, and return their further files.

        Raises:
            LayoutError: there are no tensors.
        """
        self._weights.accept()
        for meta, fingerprint in fingerprints(self._weights.begin(), self.bits):
            self._filled[meta.name] = TensorEntry(meta, fingerprint, None, None, None)
        if not self._filled:
            raise LayoutError("the source has no tensors; expected every tensor of the model")
        return self._weights.files()

    def refresh(self, source: WeightSource, phases: Phases) -> Mapping[str, TensorEntry]:
        """Begin again with the weights as they are, and return the table that goes with them."""
        base = self.require_held().manifest
        self._weights.accept()
        metas = self._weights.begin()
        for meta in metas:
            check_tensor(meta, base, ())
        check_complete(base, {meta.name: meta for meta in metas})
        with phases("diff"):
            found = fingerprints(metas, self.bits)
            return {meta.name: TensorEntry(meta, now, None, None, None) for meta, now in found}

    def bits(self, name: str) -> Bits:
        """Return the bits of a tensor as they are now."""
        return self._weights.bits(name)

    def difference(
        self, meta: TensorMeta, bits: Bits, phases: Phases, units: range
    ) -> WatchedDifference:
        """Return what differs in these units, by those that were seen to be written.

        Raises:
            BaseVersionError: the tensor was written where it could not be seen.
        """
        self._weights.require_seen(meta.name)
        proof = self._proofs.setdefault(meta.name, Proof()) if self._is_checked(meta) else None
        return WatchedDifference(meta, self._weights, bits, phases, units, proof)

    def confirm(self, meta: TensorMeta, fingerprint: Fingerprint) -> None:
        """Check that the tensor holds the base's bits but for what was seen to change.

        Raises:
            BaseVersionError: it does not: something wrote it unseen, or it did not begin as the base.
        """
        if self._is_checked(meta) and self._proofs[meta.name].fingerprint != fingerprint:
            self._refuse(meta.name)

    def _is_checked(self, meta: TensorMeta) -> bool:
        return not self._is_base() or self._weights.is_to_be_checked(meta.name)

    def _is_base(self) -> bool:
        return self._weights.base_sha256 == self.require_held().sha256

    def check_unwritten(self) -> None:
        """Check that the weights are still those that were published; see `WatchedWeights`."""
        self._weights.check_unwritten()

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Go on from a version that has just been committed; there are no records to apply."""
        self._held = held
        self._weights.rebase(held.sha256)

    def _refuse(self, name: str) -> NoReturn:
        version = self.require_held().version
        if self._is_base():
            fault = (
                f"tensor {name!r} is not version {version} plus the changes that were seen: something "
                "wrote it that torch does not tell of, such as .data, a custom kernel or a _foreach_ "
                "operation outside of optimizer.step and writing(); if it is the step itself, "
                'watch(..., compare="step") sees it'
            )
        else:
            fault = (
                f"tensor {name!r} did not hold the bits of version {version}, the current one of the "
                "run, when its changes were first watched (training was resumed from other weights, or "
                "the last commit's answer got lost)"
            )
        raise BaseVersionError(
            f"{fault}; publish(weights, full=True) starts again from the weights as they are",
            tensor=name,
            version=version,
        )


class Proof:
    """The fingerprint of what a tensor holds, summed up from windows in any order, on any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.fingerprint = ZERO

    def add(self, part: Fingerprint) -> None:
        """Add the fingerprint of one more window."""
        with self._lock:
            self.fingerprint += part


class WatchedDifference:
    """Iterate windows of one tensor; afterwards `changed` and `fingerprint` say what was found in them.

    Units that were written and hold the base's bits again are no changes.
    Memory: O(dirty units of one window).

    Args:
        bits: (meta.unit_count,) bits to publish; only read.
        units: which of the tensor's units to go through, beginning at a window's first.
        proof: where to add the fingerprint of the bits; None: they are trusted.
    """

    def __init__(
        self,
        meta: TensorMeta,
        weights: WatchedWeights,
        bits: Bits,
        phases: Phases,
        units: range,
        proof: Proof | None,
    ) -> None:
        self._meta = meta
        self._weights = weights
        self._bits = bits
        self._phases = phases
        self._units = units
        self._proof = proof
        self.changed = 0
        self.fingerprint = ZERO

    def __iter__(self) -> Iterator[Window]:
        seeds = kernels.seeds(self._meta.name)
        for start in range(self._units.start, self._units.stop, WINDOW_UNITS):
            window = self._bits[start : min(start + WINDOW_UNITS, self._units.stop)]
            with self._phases("diff"):
                places, base_bits = self._weights.changes(self._meta.name, start)
                kept, old_bits, new_bits = kernels.diff(base_bits, kernels.gather(window, places))
                offsets = kernels.gather(places, kept)
                self.changed += offsets.size
                self.fingerprint += kernels.fingerprint_change(
                    start, offsets, old_bits, new_bits, seeds
                )
                if self._proof is not None:
                    self._proof.add(kernels.fingerprint(window, start, seeds))
            yield Window(start, window, offsets, old_bits, new_bits)
