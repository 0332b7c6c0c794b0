"""Prove a tensor's digest from its base and the changes, while the changes pass through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from syncline import kernels
from syncline.errors import VerifyError
from syncline.format import checksum as checksums
from syncline.types import Bits, Changes, Span, TensorMeta

_PIECE_UNITS = 1 << 20


def proved(
    meta: TensorMeta,
    pieces: Iterable[Changes | Span],
    base: Bits,
    *,
    checksum: str,
    expected: str,
    where: str,
) -> Iterator[Changes | Span]:
    """Pass pieces on, in ascending order; at the end the new bits have the expected digest.

    Args:
        pieces: what to overwrite, in ascending order.
        base: (meta.unit_count,) bits that stand where nothing is overwritten; only read.
        checksum: name of the digest.
        where: begins the message.

    Raises:
        VerifyError: the digest of the new bits is another one. Until then nothing that was passed on is
            proved.

    Cost: reads the whole base once. Memory: the range that one piece covers.
    """
    digest = checksums.new(checksum)
    position = 0
    for piece in pieces:
        _take(digest, base[position : piece.start])
        if isinstance(piece, Span):
            checksums.update(digest, piece.bits)
            position = piece.start + piece.bits.size
        elif piece.offsets.size:
            position = piece.start + int(piece.offsets[-1]) + 1
            window = base[piece.start : position].copy()
            kernels.scatter(window, piece.offsets, piece.bits)
            checksums.update(digest, window)
        else:
            position = piece.start
        yield piece
    _take(digest, base[position:])
    found = digest.hexdigest()
    if found != expected:
        raise VerifyError(
            f"{where}: tensor {meta.name!r}: expected {checksum} {expected}, found {found}: the payload is "
            "damaged, or it was made on other bits than the base's; nothing was written",
            tensor=meta.name,
        )


def _take(digest: checksums.Checksum, bits: Bits) -> None:
    for start in range(0, bits.size, _PIECE_UNITS):
        checksums.update(digest, bits[start : start + _PIECE_UNITS])
