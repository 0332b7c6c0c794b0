"""`.syncline/state.json` in a checkpoint directory: which version it holds, and whether it is being changed.

The file is only ever replaced as a whole. It names the held version by digest and carries its manifest, so
that a receiver can carry on after a restart without the store's help.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from syncline.errors import FormatError, StoreError
from syncline.format import manifest as manifest_format
from syncline.format import strict_json
from syncline.version import HeldVersion, PartEntry

FOLDER = ".syncline"
"""The hidden folder that marks a checkpoint directory as Syncline's."""

FILE = "state.json"
JOURNAL = "journal"

Status = Literal["clean", "applying", "creating"]

_FORMAT = "syncline-state"
_KEYS = ("format", "format_version", "status", "held", "journal")
_HELD_KEYS = ("sha256", "manifest", "sidecar")
_JOURNAL_KEYS = ("size_bytes", "sha256")
_LIMIT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """What a checkpoint directory says of itself.

    Attributes:
        status: `clean`: the weights are those of `held`, whole. `applying`: they are on their way to
            `held`, a mix until the journal has been redone. `creating`: it is being filled.
        held: the version; None if the directory was taken over and its version is not known.
        journal: size and digest of the journal while `applying`, else None.
    """

    status: Status
    held: HeldVersion | None
    journal: PartEntry | None = None

    @property
    def is_changing(self) -> bool:
        """Whether the weights may be a mix of two versions: do not load them."""
        return self.status != "clean"


def dump(state: DirectoryState) -> bytes:
    """Return the canonical text of a state."""
    held, journal = state.held, state.journal
    return strict_json.dump(
        {
            "format": _FORMAT,
            "format_version": 1,
            "status": state.status,
            "held": None if held is None else _held_document(held),
            "journal": None
            if journal is None
            else {"size_bytes": journal.size_bytes, "sha256": journal.sha256},
        }
    )


def load(data: bytes, where: str = FILE) -> DirectoryState:
    """Return the state that this text stands for.

    Raises:
        FormatError: it is not exactly what `dump` writes.
    """
    fields = strict_json.document(data, where, _FORMAT, _KEYS, limit_bytes=_LIMIT_BYTES)
    status = cast(Status, fields.word("status", "clean", "applying", "creating"))
    journal = None
    if (fields["journal"] is not None) != (status == "applying"):
        fields.refuse("journal", "there exactly while the status is applying")
    if fields["journal"] is not None:
        row = strict_json.Fields(fields["journal"], where, _JOURNAL_KEYS, "journal")
        journal = PartEntry(JOURNAL, row.integer("size_bytes"), row.hexadecimal("sha256", 64))
    held = None if fields["held"] is None else _held(fields["held"], where)
    if held is None and status == "applying":
        fields.refuse("held", "a version while the status is applying")
    return DirectoryState(status, held, journal)


def read(directory: Path) -> DirectoryState | None:
    """Return what a checkpoint directory says of itself; None if it is not Syncline's.

    Raises:
        FormatError: the state file is damaged.
        StoreError: the system refuses to read it.
    """
    path = directory / FOLDER / FILE
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"read {path}: {error.strerror}") from error
    return load(data, str(path))


def _held_document(held: HeldVersion) -> dict[str, Any]:
    text, sidecar = manifest_format.dump(held.manifest)
    return {
        "sha256": held.sha256,
        "manifest": text.decode(),
        "sidecar": None if sidecar is None else base64.b64encode(sidecar).decode(),
    }


def _held(value: object, where: str) -> HeldVersion:
    row = strict_json.Fields(value, where, _HELD_KEYS, "held")
    sidecar = None
    if row["sidecar"] is not None:
        try:
            sidecar = base64.b64decode(row.text("sidecar"), validate=True)
        except ValueError as error:  # binascii.Error is one; text that is not ASCII raises another
            raise FormatError(f"{row.place('sidecar')} is not base64: {error}") from None
    # A lone surrogate passes here, so that the parser refuses it with the place.
    text = row.text("manifest").encode("utf-8", "surrogatepass")
    manifest = manifest_format.load(text, sidecar, f"{where}: held.manifest")
    return HeldVersion(manifest, row.hexadecimal("sha256", 64))
