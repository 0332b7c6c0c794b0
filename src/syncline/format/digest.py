"""SHA-256 of what is stored: while it is written, and before it is believed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from syncline.abc import Buffer
from syncline.errors import VerifyError
from syncline.version import PartEntry


def sha256(data: Buffer) -> str:
    """Return the digest of `data` as 64 lowercase hexadecimal digits.

    Example:
        >>> sha256(b"")[:16]
        'e3b0c44298fc1c14'
    """
    return hashlib.sha256(data).hexdigest()


class Tally:
    """Size and digest of chunks, counted while they pass through to somewhere else.

    Args:
        chunks: what to pass on; each chunk is hashed before it is yielded and never kept.

    Example:
        >>> tally = Tally([b"ab", b"c"])
        >>> b"".join(tally), tally.entry("x").size_bytes
        (b'abc', 3)
    """

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        self._chunks = chunks
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    def __iter__(self) -> Iterator[Buffer]:
        for chunk in self._chunks:
            self._digest.update(chunk)
            self._size_bytes += memoryview(chunk).nbytes
            yield chunk

    def entry(self, path: str) -> PartEntry:
        """Return the manifest's entry for what has passed so far."""
        return PartEntry(path, self._size_bytes, self._digest.hexdigest())


def check(entry: PartEntry, data: Buffer) -> None:
    """Check that `data` is what the manifest's entry names.

    Raises:
        VerifyError: its size or its digest is another.
    """
    found_bytes = memoryview(data).nbytes
    if found_bytes != entry.size_bytes:
        raise VerifyError(
            f"{entry.path}: the manifest names {entry.size_bytes} bytes, found {found_bytes}; "
            "fetch it again"
        )
    found = sha256(data)
    if found != entry.sha256:
        raise VerifyError(
            f"{entry.path}: the manifest names SHA-256 {entry.sha256}, found {found}; "
            "fetch it again"
        )
