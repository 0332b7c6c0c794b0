"""Bytes of a slot as a store gives them: the whole payload, or raw units in pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from syncline.abc import Store
from syncline.errors import FormatError, VerifyError
from syncline.format import companions
from syncline.format.digest import sha256
from syncline.interchange.headers import Slot
from syncline.types import ObjectInfo, Span, TensorMeta, unsigned

PIECE_BYTES = 8 << 20
"""What is read of an object at a time."""

_MOST_TIMES, _MOST_BESIDE_BYTES = 16, 1 << 16
"""No payload has a use for more: a position of 8 bytes for every byte of a tensor, and as much again."""


def payload(store: Store, slot: Slot, meta: TensorMeta) -> bytes:
    """Return all bytes of a slot.

    Args:
        meta: of the base's tensor that they change.

    Raises:
        FormatError: they are far more than the tensor can use, and were not read; or the object has become
            shorter since its header was read.
    """
    check_size(slot.stop - slot.start, meta.nbytes, f"{slot.key}: tensor {meta.name!r}")
    return _get(store, slot.key, slot.start, slot.stop)


def spans(store: Store, slot: Slot) -> Iterator[Span]:
    """Yield the raw units of a tensor in pieces that tile it, in ascending order.

    Raises:
        FormatError: the object has become shorter since its header was read.
    """
    dtype = unsigned(slot.meta.unit_bytes)
    for start in range(slot.start, slot.stop, PIECE_BYTES):
        raw = _get(store, slot.key, start, min(start + PIECE_BYTES, slot.stop))
        yield Span((start - slot.start) // slot.meta.unit_bytes, np.frombuffer(raw, dtype))


def check_size(size_bytes: int, weights_bytes: int, where: str) -> None:
    """Check, before it is read into memory, that a payload is no longer than its weights can use.

    Raises:
        FormatError: it is.
    """
    most_bytes = _MOST_TIMES * weights_bytes + _MOST_BESIDE_BYTES
    if size_bytes > most_bytes:
        raise FormatError(
            f"{where}: what changes {weights_bytes} bytes of weights is at most {most_bytes} bytes, found "
            f"{size_bytes}"
        )


def check_sha256(store: Store, info: ObjectInfo, expected: str, named_by: str) -> None:
    """Check that an object has the SHA-256 that another one names.

    Args:
        named_by: file and field that name the digest, for the message.

    Raises:
        VerifyError: it has another one.

    Cost: reads the object once, in pieces.
    """
    digest = hashlib.sha256()
    for start in range(0, info.size_bytes, PIECE_BYTES):
        digest.update(store.get(info.key, start, min(start + PIECE_BYTES, info.size_bytes)))
    _check_digest(digest.hexdigest(), info.key, expected, named_by)


def whole(store: Store, info: ObjectInfo, expected: str, named_by: str) -> bytes:
    """Return an object, whose bytes have the SHA-256 that another one names.

    Raises:
        VerifyError: they have another one.
    """
    content = store.get(info.key, 0, info.size_bytes)
    _check_digest(sha256(content), info.key, expected, named_by)
    return content


def files(store: Store, infos: Mapping[str, ObjectInfo]) -> dict[str, bytes]:
    """Return those of some files that travel with a checkpoint: configuration, tokenizer, licence.

    Args:
        infos: the files of a full version, by name.

    Raises:
        ConfigError: one is a pickle or an archive in disguise.
        FormatError: one is too large for a file beside the weights.
    """
    found = {}
    for name, info in sorted(infos.items()):
        if companions.belongs(name):
            if info.size_bytes > companions.MAX_FILE_BYTES:
                raise FormatError(
                    f"{info.key}: a file beside the weights is at most {companions.MAX_FILE_BYTES} bytes, "
                    f"found {info.size_bytes}"
                )
            found[name] = store.get(info.key)
            companions.check(found[name], info.key)
    return found


def _check_digest(found: str, key: str, expected: str, named_by: str) -> None:
    if found != expected:
        raise VerifyError(
            f"{key}: {named_by} says SHA-256 {expected}, found {found}: the file is damaged or was "
            "replaced; nothing was written"
        )


def _get(store: Store, key: str, start: int, stop: int) -> bytes:
    found = store.get(key, start, stop)
    if len(found) != stop - start:
        raise FormatError(
            f"{key}: expected {stop - start} bytes from byte {start} on, found {len(found)}: the file was "
            "cut short while it was read"
        )
    return found
