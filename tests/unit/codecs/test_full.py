from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from syncline import codecs
from syncline.errors import CodecError
from syncline.types import TensorMeta, Window

FULL = codecs.get("full")
NO_BASE = np.empty(0, np.uint16)


def test_spans_are_views_of_the_payload() -> None:
    meta = TensorMeta("w", "BF16", (3,))
    buffer = bytearray(b"\1\2\3\4\5\6")
    (span,) = FULL.decode(meta, buffer, NO_BASE)
    assert span.bits.tolist() == [0x201, 0x403, 0x605]  # type: ignore[union-attr]
    buffer[0] = 9
    assert span.bits[0] == 0x209


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(
        CodecError, match=r"tensor 'w', encoding full: .* must be 6 bytes long, found 5"
    ):
        list(FULL.decode(TensorMeta("w", "BF16", (3,)), bytes(5), NO_BASE))


def test_a_tensor_above_4_gib_needs_no_memory(tmp_path: Path) -> None:
    meta = TensorMeta("w", "BF16", ((1 << 31) + 3,))
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(meta.nbytes)
        file.seek(meta.nbytes - 2)
        file.write(b"\x34\x12")
    payload = np.memmap(path, np.uint8, "r")
    end = 0
    for span in FULL.decode(meta, payload.data, NO_BASE):
        assert span.start == end
        end += span.bits.size
    assert (end, span.bits[-1]) == (meta.unit_count, 0x1234)


def test_windows_are_copied_one_by_one() -> None:
    meta = TensorMeta("w", "BF16", (4,))
    bits = np.arange(4, dtype=np.uint16)
    none = np.empty(0, np.uint32), NO_BASE, NO_BASE
    head, *chunks = list(FULL.encode(meta, (Window(s, bits[s : s + 2], *none) for s in (0, 2))))
    bits[:] = 0
    assert head == b""
    assert chunks == [b"\0\0\1\0", b"\2\0\3\0"]
