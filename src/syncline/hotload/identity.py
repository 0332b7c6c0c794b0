"""How a snapshot is called on the wire: opaque to a client, a version of our run to our server."""

from __future__ import annotations

import unicodedata
from typing import Literal

from syncline.errors import ConfigError, FormatError
from syncline.format import names

Spelling = Literal["directory", "number"]

MAX_CHARACTERS = 255


def check(identity: object, where: str) -> str:
    """Return the identity of a snapshot if it may be one: one path segment of printable characters.

    Raises:
        ConfigError: it is empty, too long, could leave its directory, or has control characters.

    Example:
        >>> check("step-7", "identity")
        'step-7'
    """
    if (
        not isinstance(identity, str)
        or not 1 <= len(identity) <= MAX_CHARACTERS
        or identity.startswith(".")
        or any(c in "/\\" or unicodedata.category(c)[0] == "C" for c in identity)
    ):
        raise ConfigError(
            f"{where} must be one path segment of 1 to {MAX_CHARACTERS} printable characters that does "
            f"not begin with a dot, found {identity!r:.80}"
        )
    return identity


def parse(identity: str, where: str) -> tuple[int, Spelling]:
    """Return the version that an identity names, and how it is spelled.

    Raises:
        FormatError: it is neither a version's number nor its directory name.

    Example:
        >>> parse("weight_v000123", "identity"), parse("123", "identity")
        ((123, 'directory'), (123, 'number'))
    """
    version = names.version_of(identity)
    if version is not None:
        return version, "directory"
    # No digits but ASCII ones, and few enough for `int` to be quick.
    if identity.isascii() and identity.isdigit() and len(identity) <= 19 and identity[0] != "0":
        number = int(identity)
        if number <= names.MAX_INTEGER:
            return number, "number"
    raise FormatError(
        f"{where} must be a version's number, such as '123', or its directory name, such as "
        f"{names.version_dir(123)!r}, found {identity!r:.80}"
    )


def spell(version: int, spelling: Spelling) -> str:
    """Return the identity of a version.

    Example:
        >>> spell(123, "directory"), spell(123, "number")
        ('weight_v000123', '123')
    """
    return names.version_dir(version) if spelling == "directory" else str(version)
