"""Checkpoint directories that a server loads: proved before it reads them, and again when it has.

What is written between the two is noticed by its place, size and times, and by its bits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from syncline.engines.checkpoint_files import CheckpointFiles, failing
from syncline.errors import SynclineError, VerifyError
from syncline.sync.checks import listed
from syncline.sync.fingerprints import fingerprints
from syncline.types import Fingerprint
from syncline.version import HeldVersion

_READ = (".safetensors", ".safetensors.index.json")
"""How the files are named that SGLang reads weights from."""

Prints = Mapping[str, Fingerprint]


class Loadable(Protocol):
    """A directory that a server is told to load.

    Attributes:
        path: where it is.
    """

    path: Path

    def look(self) -> None:
        """Check that nobody has written there since it was proved, by what the system says of the files.

        Raises:
            VerifyError: somebody has.
        """

    def check(self) -> None:
        """Check that what the server has read was what it was to read: `look`, and every bit.

        Raises:
            VerifyError: it may have been something else.
        """


class Proved:
    """A directory whose tensors have these fingerprints, from now on until `check`.

    Raises:
        VerifyError: a tensor is missing, or has another fingerprint.
        CommitError: the system refuses to read.

    Cost: reads every bit of the tensors, as does `check`.
    """

    def __init__(self, path: Path, wanted: Prints) -> None:
        self.path = path
        self._wanted = wanted
        self._stamps = _stamps(path)
        self._prove()

    def look(self) -> None:
        """See `Loadable.look`."""
        found = _stamps(self.path)
        if found != self._stamps:
            changed = sorted(name for name, _ in set(found) ^ set(self._stamps))
            raise VerifyError(
                f"{self.path}: {listed(list(dict.fromkeys(changed)))} changed while the server loaded it; "
                "nobody else may write there"
            )

    def check(self) -> None:
        """See `Loadable.check`."""
        self.look()
        self._prove()

    def _prove(self) -> None:
        try:
            files = CheckpointFiles(self.path)
        except SynclineError as error:
            raise VerifyError(f"{self.path} is no checkpoint any more: {error}") from error
        metas = files.metas()
        missing = sorted(self._wanted.keys() - metas.keys())
        found = fingerprints((metas[name] for name in self._wanted if name in metas), files.view)
        wrong = [meta.name for meta, value in found if value != self._wanted[meta.name]]
        if missing or wrong:
            raise VerifyError(
                f"{self.path}: {len(missing) + len(wrong)} of {len(self._wanted)} tensors do not hold the bits "
                f"that are to be loaded: {listed(missing + wrong)}; nobody else may write there",
                tensor=(missing + wrong)[0],
            )


class Unseen:
    """A directory on the server's own host, which proves it by itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def look(self) -> None:
        """See `Loadable.look`: it cannot be looked at from here."""

    def check(self) -> None:
        """See `Loadable.check`: it cannot be looked at from here."""


def prints(held: HeldVersion) -> Prints:
    """Return the fingerprint of every tensor of a version."""
    return {entry.meta.name: entry.fingerprint for entry in held.manifest.tensors}


def _stamps(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return what the system says of every file that weights are read from, and of the directory itself, which may be a link."""
    with failing(f"look at {path}"):
        where = path.stat()
        found: list[tuple[str, tuple[int, ...]]] = [(str(path), (where.st_dev, where.st_ino))]
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.endswith(_READ) and entry.is_file():
                    at = entry.stat()
                    times = (at.st_mtime_ns, at.st_ctime_ns)
                    found.append((entry.name, (at.st_dev, at.st_ino, at.st_size, *times)))
    return found
