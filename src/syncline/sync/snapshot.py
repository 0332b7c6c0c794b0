"""The publisher's copy of the last version's weights, in memory or in memory-mapped files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import numpy as np

from syncline import device
from syncline.abc import WeightSource
from syncline.device import DeviceCopies
from syncline.engines.memory import MemoryEngine
from syncline.errors import BaseVersionError, LayoutError, StoreError
from syncline.sync.checks import check_complete, check_tensor
from syncline.sync.detect import Difference
from syncline.sync.fingerprints import fingerprints
from syncline.sync.phases import Phases
from syncline.types import Bits, DeviceBits, Fingerprint, TensorMeta, unsigned
from syncline.version import HeldVersion, TensorEntry


class Snapshot(MemoryEngine):
    """An engine that serves nobody: it holds the bits to compare the next version with.

    Args:
        directory: keep the bits in unnamed temporary files there; None: in memory.
        device_copy: keep another copy beside weights in GPU memory, so that they are compared there.
    """

    def __init__(
        self, directory: str | PathLike[str] | None = None, *, device_copy: bool = False
    ) -> None:
        self.copies = DeviceCopies() if device_copy else None
        self._directory = None if directory is None else Path(directory)
        super().__init__(allocate=self._allocate)
        self._filled: dict[str, TensorEntry] = {}

    def fill(self, source: WeightSource) -> Mapping[str, bytes]:
        """Copy every tensor of a source, and return its further files.

        Raises:
            LayoutError: a name comes twice, or no tensor comes at all.
        """
        for meta, bits in source.tensors():
            copy = self.add(meta)
            device.follow(bits)
            for start, window in device.host_windows(bits, range(meta.unit_count)):
                np.copyto(copy[start : start + window.size], window)
        if not self.tensors():
            raise LayoutError("the source has no tensors; expected every tensor of the model")
        for meta, fingerprint in fingerprints(self.tensors().values(), self.bits):
            self._filled[meta.name] = TensorEntry(meta, fingerprint, None, None, None)
        return source.files()

    def refresh(self, source: WeightSource, phases: Phases) -> Mapping[str, TensorEntry]:
        """Take over the bits of a source and return the table that goes with them."""
        base = self.require_held().manifest
        seen: dict[str, TensorEntry] = {}
        for meta, bits in source.tensors():
            check_tensor(meta, base, seen)
            difference = self.difference(meta, bits, phases, range(meta.unit_count))
            for _ in difference:
                pass
            fingerprint = base.by_name[meta.name].fingerprint + difference.fingerprint
            seen[meta.name] = TensorEntry(meta, fingerprint, None, None, None)
        check_complete(base, seen)
        return seen

    def difference(
        self, meta: TensorMeta, bits: Bits | DeviceBits, phases: Phases, units: range
    ) -> Difference:
        """Return what differs in these units; iterating it makes the snapshot hold them."""
        return Difference(meta, self.bits(meta.name), bits, phases, units, self.copies)

    def confirm(self, meta: TensorMeta, fingerprint: Fingerprint) -> None:
        """Do nothing: every bit was compared."""

    def check_unwritten(self) -> None:
        """Do nothing: nobody else writes a copy."""

    def table(self) -> Mapping[str, TensorEntry]:
        """Return the tensors and fingerprints that the snapshot holds."""
        held = self.held()
        return self._filled if held is None else held.manifest.by_name

    def require_held(self) -> HeldVersion:
        """Return the version that the snapshot holds.

        Raises:
            BaseVersionError: it holds none.
        """
        held = self.held()
        if held is None:
            raise BaseVersionError("the snapshot holds no version to make a delta on")
        return held

    def _allocate(self, meta: TensorMeta) -> Bits:
        dtype = unsigned(meta.unit_bytes)
        if self._directory is None or meta.unit_count == 0:
            return np.empty(meta.unit_count, dtype)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # The file has no name once it is open, so that no crash leaves it behind.
            with tempfile.TemporaryFile(dir=self._directory) as file:
                _reserve(file.fileno(), meta.nbytes)
                return np.memmap(file, dtype, "r+", shape=(meta.unit_count,))
        except OSError as error:
            raise StoreError(
                f"{self._directory} cannot hold the {meta.nbytes} bytes of tensor {meta.name!r} for a "
                f"snapshot: {error.strerror}"
            ) from error


def _reserve(fd: int, nbytes: int) -> None:
    """Make a file so long, on blocks of its own: a disk that is full under a map ends the process."""
    os.ftruncate(fd, nbytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
