"""Payloads of the version that was published last, kept for the engines that take it over a live path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from tempfile import SpooledTemporaryFile
from typing import IO

from syncline.abc import Buffer
from syncline.format import part as part_format
from syncline.format.part import temporary_file
from syncline.version import Manifest

_MEMORY_BYTES = 64 << 20


class Kept:
    """Copies of a delta's parts, in memory or in temporary files without a name."""

    def __init__(self) -> None:
        self._parts: dict[str, IO[bytes]] = {}

    def copying(self, path: str, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        """Pass a part's chunks on and keep them."""
        file: IO[bytes] = SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115 - `close` does
        self._parts[path] = file
        for chunk in chunks:
            with temporary_file():
                file.write(chunk)
            yield chunk

    def payloads(self, manifest: Manifest) -> dict[str, memoryview]:
        """Return the payload of every tensor that the version carries.

        Raises:
            FormatError: the parts are not those of this version.
        """
        found: dict[str, memoryview] = {}
        for index, entry in enumerate(manifest.parts):
            file = self._parts[entry.path]
            with temporary_file():
                file.seek(0)
                raw = file.read()
            found |= part_format.load(raw, manifest, index)
        return found

    def part(self, path: str) -> dict[str, memoryview]:
        """Return the payloads in one part by the names in its header."""
        file = self._parts[path]
        with temporary_file():
            file.seek(0)
            raw = memoryview(file.read())
        header = part_format.read_header(raw, raw.nbytes, path)
        return {name: raw[slot.start : slot.stop] for name, slot in header.slots.items()}

    def close(self) -> None:
        """Forget them all."""
        parts, self._parts = self._parts, {}
        for file in parts.values():
            file.close()
