"""Digests of a tensor's new bytes, by the names that slime-family indexes give them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
import xxhash

from syncline.abc import Buffer
from syncline.errors import ConfigError, FormatError
from syncline.types import Bits

DIGITS: Mapping[str, int] = MappingProxyType({"xxh3-128": 32, "blake3": 64, "adler32": 8})
"""Hexadecimal digits of every checksum, by name."""

NAMES = tuple(DIGITS)

_HEX = re.compile(r"[0-9a-f]+")


class Checksum(Protocol):
    """A digest that takes bytes in order."""

    def update(self, data: Buffer, /) -> object:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """Return the digest of what was taken so far, in lowercase hexadecimal digits."""


class Adler32:
    """Adler-32 as a `Checksum`; a running sum of 32 bits, good against accidents only."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Buffer, /) -> None:
        """Take the next bytes."""
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        """Return 8 digits, zeros in front included."""
        return f"{self._value:08x}"


def new(name: str) -> Checksum:
    """Return a fresh checksum.

    Raises:
        ConfigError: there is none of this name, or the package that computes it is missing.

    Example:
        >>> new("adler32").hexdigest()
        '00000001'
    """
    if name == "xxh3-128":
        return xxhash.xxh3_128()
    if name == "adler32":
        return Adler32()
    if name == "blake3":
        return _blake3()
    raise ConfigError(f"checksum must be one of {NAMES}, found {name!r}")


def update(checksum: Checksum, bits: Bits) -> None:
    """Let a checksum take units as bytes. Aliasing: reads them in place."""
    checksum.update(np.ascontiguousarray(bits).view(np.uint8).data)


def check(name: str, text: object, where: str) -> str:
    """Return `text` if it can be a digest of the checksum `name`.

    Raises:
        FormatError: another number of digits, or no lowercase hexadecimal ones.
    """
    digits = DIGITS[name]
    if not isinstance(text, str) or len(text) != digits or _HEX.fullmatch(text) is None:
        raise FormatError(
            f"{where} must be {digits} lowercase hexadecimal digits of {name}, found {text!r:.80}"
        )
    return text


def _blake3() -> Checksum:
    try:
        from blake3 import blake3  # noqa: PLC0415 - an extra is imported where it is used
    except ImportError as error:
        raise ConfigError(
            "checksum 'blake3' needs the package blake3: pip install 'syncline[interchange]'"
        ) from error
    fresh: Checksum = blake3()
    return fresh
