"""The `hook` detector's side of publishing: the base is what the weights hold, but for dirty units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from syncline import kernels
from syncline.abc import WeightSource
from syncline.errors import BaseVersionError, LayoutError
from syncline.sources import WatchedWeights
from syncline.sync.checks import check_complete, check_tensor, fingerprint_all
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
        for meta, bits in self._weights.tensors():
            fingerprint = fingerprint_all(meta, bits)
            self._filled[meta.name] = TensorEntry(meta, fingerprint, None, None, None)
        if not self._filled:
            raise LayoutError("the source has no tensors; expected every tensor of the model")
        return self._weights.files()

    def refresh(self, source: WeightSource, phases: Phases) -> Mapping[str, TensorEntry]:
        """Begin again with the weights as they are, and return the table that goes with them."""
        base = self.require_held().manifest
        self._weights.accept()
        seen: dict[str, TensorEntry] = {}
        for meta, bits in self._weights.tensors():
            check_tensor(meta, base, seen)
            with phases("diff"):
                fingerprint = fingerprint_all(meta, bits)
            seen[meta.name] = TensorEntry(meta, fingerprint, None, None, None)
        check_complete(base, seen)
        return seen

    def bits(self, name: str) -> Bits:
        """Return the bits of a tensor as they are now."""
        return self._weights.bits(name)

    def difference(self, meta: TensorMeta, bits: Bits, phases: Phases) -> WatchedDifference:
        """Return what differs in these bits, by the units that were seen to be written."""
        held = self.require_held()
        is_base = self._weights.base_sha256 == held.sha256
        is_checked = not is_base or self._weights.is_to_be_checked(meta.name)
        before = held.manifest.by_name[meta.name].fingerprint if is_checked else None
        return WatchedDifference(meta, self._weights, bits, held, before, phases)

    def check_unwritten(self) -> None:
        """Check that the weights are still those that were published; see `WatchedWeights`."""
        self._weights.check_unwritten()

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Go on from a version that has just been committed; there are no records to apply."""
        self._held = held
        self._weights.rebase(held.sha256)


class WatchedDifference:
    """Iterate the windows of one tensor; afterwards `changed` and `fingerprint` say what was found.

    Units that were written and hold the base's bits again are no changes.
    Memory: O(dirty units of the tensor).

    Args:
        bits: (meta.unit_count,) bits to publish; only read.
        before: the tensor's fingerprint at the base version, to prove the bits by; None: trust them.

    Raises:
        BaseVersionError: while it is iterated, if the tensor does not hold the base's bits but for what
            was seen to change.
    """

    def __init__(
        self,
        meta: TensorMeta,
        weights: WatchedWeights,
        bits: Bits,
        held: HeldVersion,
        before: Fingerprint | None,
        phases: Phases,
    ) -> None:
        self._meta = meta
        self._weights = weights
        self._bits = bits
        self._held = held
        self._before = before
        self._phases = phases
        self.changed = 0
        self.fingerprint = ZERO

    def __iter__(self) -> Iterator[Window]:
        seeds = kernels.seeds(self._meta.name)
        now = ZERO
        for start, places, base_bits in self._weights.changes(self._meta.name):
            window = self._bits[start : start + WINDOW_UNITS]
            with self._phases("diff"):
                kept, old_bits, new_bits = kernels.diff(base_bits, kernels.gather(window, places))
                offsets = kernels.gather(places, kept)
                self.changed += offsets.size
                self.fingerprint += kernels.fingerprint_change(
                    start, offsets, old_bits, new_bits, seeds
                )
                if self._before is not None:
                    now += kernels.fingerprint(window, start, seeds)
            yield Window(start, window, offsets, old_bits, new_bits)
        if self._before is not None and now != self._before + self.fingerprint:
            self._refuse()

    def _refuse(self) -> None:
        name, version = self._meta.name, self._held.version
        if self._weights.base_sha256 == self._held.sha256:
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
