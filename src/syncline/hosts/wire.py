"""Small documents that receivers hand each other."""

from __future__ import annotations

import base64
import binascii

from syncline.errors import FormatError, PlanDisagreementError
from syncline.format import strict_json
from syncline.hosts.offer import Way
from syncline.hosts.taking import Fellow

_KEYS = ("name", "machine", "prefix", "ways", "digest")
_LIMIT_BYTES = 1 << 26


def fellow_document(fellow: Fellow, digest: str) -> bytes:
    """Return a receiver as strict JSON, with the digest of the assignment that it made."""
    ways = [[way.kind, base64.b64encode(way.described).decode()] for way in fellow.ways]
    return strict_json.dump(
        {
            "name": fellow.name,
            "machine": fellow.machine,
            "prefix": fellow.prefix,
            "ways": ways,
            "digest": digest,
        }
    )


def fellow_of(data: bytes, digest: str) -> Fellow:
    """Return the receiver that these bytes stand for.

    Raises:
        PlanDisagreementError: it made another assignment.
        FormatError: they are something else.
    """
    where = "a receiver's description"
    value = strict_json.parse(data, where, limit_bytes=_LIMIT_BYTES)
    fields = strict_json.Fields(value, where, _KEYS)
    name = fields.text("name")
    if fields.text("digest") != digest:
        raise PlanDisagreementError(
            f"receiver {name} planned differently: digest {fields.text('digest')} there, {digest} here; "
            "give all sides the same offers, layouts and version of Syncline"
        )
    ways = []
    for row in fields.items("ways"):
        if not isinstance(row, list) or len(row) != 2 or not all(isinstance(x, str) for x in row):
            fields.refuse("ways", "pairs of a transport and a description")
        try:
            ways.append(Way(row[0], base64.b64decode(row[1], validate=True)))
        except binascii.Error as error:
            raise FormatError(f"{where}: not base64: {error}") from error
    return Fellow(name, fields.text("machine"), fields.text("prefix"), tuple(ways))
