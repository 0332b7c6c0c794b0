"""What a host says of a version that it has: a short offer that travels, and the catalog that is read after it."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.errors import FormatError, VerifyError
from syncline.format import state as held_format
from syncline.format import strict_json, table
from syncline.peers import SharedPeer
from syncline.types import TensorMeta
from syncline.version import HeldVersion

MAX_CATALOG_BYTES = 1 << 28

_OFFER = "syncline-offer"
_CATALOG = "syncline-catalog"
_OFFER_LIMIT_BYTES = 1 << 26
_OFFER_KEYS = (
    "format",
    "format_version",
    "host",
    "machine",
    "run_id",
    "version",
    "sha256",
    "generation",
    "header",
    "catalog",
    "catalog_bytes",
    "catalog_sha256",
    "ways",
)


@dataclass(frozen=True, slots=True)
class Way:
    """One description of a host's memory: the transport's name, and what reads it."""

    kind: str
    described: bytes


def shared_with(ways: Sequence[Way], machine: str) -> str:
    """Return the machine if those on it can map the memory that is described, else nothing."""
    return machine if any(way.kind == SharedPeer.name for way in ways) else ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A version that a host has in memory, or a share of it.

    Attributes:
        host, machine: its name, and what `peers.shared.machine()` says there.
        run_id, version, sha256: which version; the digest is its identity.
        generation: of the memory, while it holds this version; `header`: the region that says so.
        catalog, catalog_bytes, catalog_sha256: the region that lists the tensors, and its digest.
        ways: descriptions of the memory, one for each transport and NIC.
    """

    host: str
    machine: str
    run_id: str
    version: int
    sha256: str
    generation: int
    header: str
    catalog: str
    catalog_bytes: int
    catalog_sha256: str
    ways: tuple[Way, ...]

    def dump(self) -> bytes:
        """Return it as strict JSON. Holds the transports' keys: hand it over a trusted way only."""
        document = {key: getattr(self, key) for key in _OFFER_KEYS[2:-1]}
        ways = [[way.kind, base64.b64encode(way.described).decode()] for way in self.ways]
        return strict_json.dump({"format": _OFFER, "format_version": 1, **document, "ways": ways})


def load_offer(data: bytes) -> Offer:
    """Return the offer that these bytes stand for.

    Raises:
        FormatError: they are something else.
    """
    where = "offer of a host"
    fields = strict_json.document(data, where, _OFFER, _OFFER_KEYS, limit_bytes=_OFFER_LIMIT_BYTES)
    ways = []
    for row in fields.items("ways"):
        if not isinstance(row, list) or len(row) != 2 or not all(isinstance(x, str) for x in row):
            fields.refuse("ways", "pairs of a transport and a description")
        ways.append(Way(row[0], _unbase64(row[1], where)))
    return Offer(
        host=fields.text("host"),
        machine=fields.text("machine"),
        run_id=fields.hexadecimal("run_id", 32),
        version=fields.integer("version", minimum=1),
        sha256=fields.hexadecimal("sha256", 64),
        generation=fields.integer("generation"),
        header=fields.text("header"),
        catalog=fields.text("catalog"),
        catalog_bytes=fields.integer("catalog_bytes", maximum=MAX_CATALOG_BYTES),
        catalog_sha256=fields.hexadecimal("catalog_sha256", 64),
        ways=tuple(ways),
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a whole tensor lies in a host's memory, row-major, from its first unit on."""

    meta: TensorMeta
    region: str
    offset: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """What a host has of a version.

    Attributes:
        held: the version, with its manifest.
        tensors: those that this host has, by name.
        files: a checkpoint's further files (config, tokenizer), where the host was given them.
    """

    held: HeldVersion
    tensors: Mapping[str, Stored]
    files: Mapping[str, bytes]

    def dump(self) -> bytes:
        """Return it as strict JSON."""
        state = held_format.dump(held_format.DirectoryState("clean", self.held))
        return strict_json.dump(
            {
                "format": _CATALOG,
                "format_version": 1,
                "held": base64.b64encode(state).decode(),
                "tensors": [
                    [s.meta.name, s.meta.dtype, list(s.meta.shape), s.region, s.offset]
                    for s in self.tensors.values()
                ],
                "files": {n: base64.b64encode(c).decode() for n, c in self.files.items()},
            }
        )


def load_catalog(data: bytes, offer: Offer) -> Catalog:
    """Return the catalog that belongs to an offer.

    Raises:
        VerifyError: another digest than the offer names; FormatError: no legal catalog, or of another version.
    """
    where = f"catalog of {offer.host}"
    if hashlib.sha256(data).hexdigest() != offer.catalog_sha256:
        raise VerifyError(
            f"{where}: its digest is not the one in the offer; ask for the offer again"
        )
    keys = ("format", "format_version", "held", "tensors", "files")
    fields = strict_json.document(data, where, _CATALOG, keys, limit_bytes=MAX_CATALOG_BYTES)
    held = held_format.load(_unbase64(fields.text("held"), where), where).held
    if held is None or held.sha256 != offer.sha256:
        raise FormatError(f"{where}: it is of another version than the offer's {offer.version}")
    tensors = {}
    for number, row in enumerate(fields.items("tensors")):
        stored = _stored(row, where, f"tensors[{number}]")
        entry = held.manifest.by_name.get(stored.meta.name)
        if entry is None or entry.meta != stored.meta or stored.meta.name in tensors:
            raise FormatError(f"{where}: {stored.meta} is not, or not once, in the manifest")
        tensors[stored.meta.name] = stored
    files = strict_json.members(fields["files"], where)
    return Catalog(
        held,
        tensors,
        {name: _unbase64(content, where) for name, content in files.items()},
    )


def _stored(row: object, where: str, path: str) -> Stored:
    cells = strict_json.items(row, f"{where}: {path}")
    if len(cells) != 5 or not isinstance(cells[0], str) or not isinstance(cells[3], str):
        raise FormatError(f"{where}: {path} must be name, dtype, shape, region and offset")
    meta = table.tensor_meta(cells[0], cells[1], cells[2], where, path)
    return Stored(meta, cells[3], strict_json.integer(cells[4], f"{where}: {path}"))


def _unbase64(text: object, where: str) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "?", validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"{where}: not base64: {error}") from error
