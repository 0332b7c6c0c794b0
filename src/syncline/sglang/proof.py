"""What a follower notes of a server after an update, so that the next one can tell what the server holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from syncline import durable
from syncline.errors import CommitError, FormatError
from syncline.format import strict_json

NAME = "proof.json"


@dataclass(frozen=True, slots=True)
class Proof:
    """Which version a server took last, and how it is known again.

    Attributes:
        sha256: digest of the version's manifest.
        checksum: SGLang's own, over all ranks: equal bits in equal layouts, and nothing else, have it.
    """

    sha256: str
    checksum: str


def write(directory: Path, proof: Proof) -> None:
    """Note it in the staging directory, durably."""
    try:
        durable.replace(
            directory / NAME,
            strict_json.dump({"sha256": proof.sha256, "checksum": proof.checksum}),
        )
    except OSError as error:
        raise CommitError(f"{directory / NAME} cannot be written: {error.strerror}") from error


def read(directory: Path) -> Proof | None:
    """Return what was noted; None if nothing was, or what there is cannot be read: then nothing is known."""
    path = directory / NAME
    try:
        found = strict_json.members(
            strict_json.parse(path.read_bytes(), str(path), limit_bytes=1 << 16), str(path)
        )
    except (OSError, FormatError):
        return None
    sha256, checksum = found.get("sha256"), found.get("checksum")
    if not isinstance(sha256, str) or not isinstance(checksum, str):
        return None
    return Proof(sha256, checksum)


def forget(directory: Path) -> None:
    """Remove the note: what the server holds is about to change.

    Raises:
        CommitError: the system refuses.
    """
    try:
        (directory / NAME).unlink(missing_ok=True)
    except OSError as error:
        raise CommitError(
            f"{directory / NAME} cannot be removed: {error.strerror}; nothing was changed"
        ) from error
