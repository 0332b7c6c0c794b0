"""`HEAD.json`: which version of a run is the current one, and who may publish the next."""

from __future__ import annotations

from syncline.format import names, strict_json
from syncline.format.rules import check_head
from syncline.version import Head

_FORMAT = "syncline-head"
_KEYS = ("format", "format_version", "run_id", "epoch", "version", "manifest_sha256")
_LIMIT_BYTES = 1 << 16


def dump(head: Head) -> bytes:
    """Return the canonical bytes of `HEAD.json`; `load` gives the head back.

    Raises:
        FormatError: the head breaks a rule of the format.

    Example:
        >>> dump(Head("0" * 32, 1, None, None)).decode().splitlines()[0][:44]
        '{"epoch":1,"format":"syncline-head","format_'
    """
    check_head(head)
    return strict_json.dump(
        {
            "format": _FORMAT,
            "format_version": names.FORMAT_VERSION,
            "run_id": head.run_id,
            "epoch": head.epoch,
            "version": head.version,
            "manifest_sha256": head.manifest_sha256,
        }
    )


def load(data: bytes, where: str = names.HEAD) -> Head:
    """Return the head that these bytes stand for.

    Args:
        data: the whole content of `HEAD.json`.
        where: what messages call it.

    Raises:
        FormatError: anything that `docs/reference/format.md`, section 2, does not allow.
    """
    fields = strict_json.document(data, where, _FORMAT, _KEYS, limit_bytes=_LIMIT_BYTES)
    head = Head(
        run_id=fields.text("run_id"),
        epoch=fields.integer("epoch"),
        version=None if fields["version"] is None else fields.integer("version"),
        manifest_sha256=(
            None if fields["manifest_sha256"] is None else fields.text("manifest_sha256")
        ),
    )
    check_head(head, where)
    return head
