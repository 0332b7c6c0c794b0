from __future__ import annotations

import hashlib

import numpy as np
import pytest

from syncline.errors import VerifyError
from syncline.format import digest
from syncline.version import PartEntry


def test_a_tally_counts_what_passes() -> None:
    chunks = [b"ab", memoryview(b"cd"), np.arange(3, dtype=np.uint16).data]
    tally = digest.Tally(chunks)
    assert tally.entry("x") == PartEntry("x", 0, hashlib.sha256().hexdigest())
    passed = b"".join(bytes(chunk) for chunk in tally)
    assert passed == b"abcd\0\0\1\0\2\0"
    assert tally.entry("x") == PartEntry("x", 10, digest.sha256(passed))
    digest.check(tally.entry("x"), passed)


def test_wrong_bytes_are_refused() -> None:
    entry = digest.Tally([b"abc"])
    list(entry)
    with pytest.raises(VerifyError, match=r"p: the manifest names 3 bytes, found 2"):
        digest.check(entry.entry("p"), b"ab")
    with pytest.raises(VerifyError, match=r"p: the manifest names SHA-256 ba7816bf.*, found"):
        digest.check(entry.entry("p"), b"abd")
