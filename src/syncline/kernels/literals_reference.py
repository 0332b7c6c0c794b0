"""Zstd frames of Huffman-coded literals in plain Python and numpy: the definition of the native writer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HIGHEST = 128
_MAX_BITS = 11
_STREAMS = 4
_BLOCK_BYTES = 1 << 17
_LEAST_FOR_CODE_BYTES = 256
_OVERHEAD_BYTES = 128
_RAW, _REPEATED, _COMPRESSED = 0, 1, 2
# Magic; a content size of four bytes and no checksum; a window of 2^17 bytes.
_HEAD = bytes.fromhex("28b52ffd8038")

U8 = NDArray[np.uint8]


def compress(data: U8) -> bytes | None:
    """Return the frame; None if a byte is above `HIGHEST`."""
    if data.size and int(data.max()) > HIGHEST:
        return None
    starts = range(0, max(1, data.size), _BLOCK_BYTES)
    blocks = [_block(data[start : start + _BLOCK_BYTES]) for start in starts]
    frame = _HEAD + data.size.to_bytes(4, "little")
    for index, (kind, size_bytes, content) in enumerate(blocks):
        head = int(index + 1 == len(blocks)) | kind << 1 | size_bytes << 3
        frame += head.to_bytes(3, "little") + content
    return frame


def _block(data: U8) -> tuple[int, int, bytes]:
    """Return kind, the size that the block's header says, and content."""
    if data.size >= _LEAST_FOR_CODE_BYTES:
        if (data == data[0]).all():
            return _REPEATED, data.size, data[:1].tobytes()
        content = _compressed(data)
        if content is not None:
            return _COMPRESSED, len(content), content
    return _RAW, data.size, data.tobytes()


def _compressed(data: U8) -> bytes | None:
    """Return the content of a compressed block; None if the code does not pay."""
    lengths = code_lengths(np.bincount(data, minlength=HIGHEST + 1).tolist())
    step = -(-data.size // _STREAMS)
    quarters = [data[index * step : (index + 1) * step] for index in range(_STREAMS)]
    length_of = np.array(lengths)
    if (
        sum(int(length_of[quarter].sum()) // 8 + 1 for quarter in quarters) + _OVERHEAD_BYTES
        >= data.size
    ):
        return None
    streams = [_stream(quarter, length_of, _codes(lengths)) for quarter in quarters]
    literals = _weights(lengths, int(data.max()))
    literals += b"".join(len(stream).to_bytes(2, "little") for stream in streams[:-1])
    literals += b"".join(streams)
    head = 2 | 3 << 2 | data.size << 4 | len(literals) << 22
    return head.to_bytes(5, "little") + literals + b"\0"  # no sequences


def code_lengths(counts: list[int]) -> list[int]:
    """Return the lengths of the best prefix code of at most 11 bits, by package-merge.

    Example:
        >>> code_lengths([8, 0, 4, 2, 2])
        [1, 0, 2, 3, 3]
    """
    order = sorted((s for s, count in enumerate(counts) if count), key=lambda s: (counts[s], s))
    rows: list[list[tuple[int, bool]]] = []
    pairs: list[tuple[int, bool]] = []
    for _ in range(_MAX_BITS):
        # A symbol before a pair of the same weight.
        row = sorted([(counts[s], False) for s in order] + pairs)
        rows.append(row)
        pairs = [(row[i][0] + row[i + 1][0], True) for i in range(0, len(row) - 1, 2)]
    lengths = [0] * len(counts)
    taken = 2 * len(order) - 2
    for row in reversed(rows):
        pair_count = sum(is_pair for _, is_pair in row[:taken])
        for symbol in order[: min(taken, len(row)) - pair_count]:
            lengths[symbol] += 1
        taken = 2 * pair_count
    return lengths


def _codes(lengths: list[int]) -> NDArray[np.uint64]:
    """Return the codes: the longest come first, and of one length the smallest symbol."""
    codes = np.zeros(len(lengths), np.uint64)
    code = 0
    for bits in range(max(lengths), 0, -1):
        for symbol in (s for s, length in enumerate(lengths) if length == bits):
            codes[symbol] = code
            code += 1
        code >>= 1
    return codes


def _weights(lengths: list[int], highest: int) -> bytes:
    """Return the description of the code: four bits a symbol; the highest one's follows from them."""
    longest = max(lengths)
    weights = [longest + 1 - length if length else 0 for length in lengths[:highest]]
    weights += [0] * (len(weights) % 2)
    packed = (high << 4 | low for high, low in zip(weights[::2], weights[1::2], strict=True))
    return bytes((127 + highest, *packed))


def _stream(data: U8, length_of: NDArray[np.int64], codes: NDArray[np.uint64]) -> bytes:
    """Return the codes of the bytes, last byte first, and a one that ends them."""
    backwards = data[::-1]
    lengths = np.append(length_of[backwards], 1)
    values = np.append(codes[backwards], np.uint64(1))
    places = np.cumsum(lengths) - lengths
    bits = np.zeros(int(lengths.sum()), np.uint8)
    for bit in range(_MAX_BITS):
        has = lengths > bit
        bits[places[has] + bit] = values[has] >> np.uint64(bit) & np.uint64(1)
    return np.packbits(bits, bitorder="little").tobytes()
