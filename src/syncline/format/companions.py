"""Files that travel with a full version: configuration, tokenizer, licence; never code or pickles."""

from __future__ import annotations

from syncline.errors import ConfigError
from syncline.format import names

MAX_FILE_BYTES = 1 << 27

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
_PREFIXES = ("LICENSE", "NOTICE")
_EXCLUDED_SUFFIX = ".index.json"
_EXCLUDED = frozenset({names.HEAD, names.MANIFEST})
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def belongs(name: str) -> bool:
    """Tell whether a file of this name travels with a checkpoint.

    Example:
        >>> belongs("config.json"), belongs("model.safetensors.index.json"), belongs("modeling.py")
        (True, False, False)
    """
    if name.startswith(".") or name.endswith(_EXCLUDED_SUFFIX) or name in _EXCLUDED:
        return False
    if name.endswith(names.PART_SUFFIX):
        return False
    return name.endswith(_SUFFIXES) or name.startswith(_PREFIXES)


def check(content: bytes, where: str) -> None:
    """Check that a file's content is what its name promises.

    Raises:
        ConfigError: it is a pickle, or an archive that may hold one.
    """
    if content.startswith(_PICKLES):
        raise ConfigError(f"{where} is a pickle or an archive in disguise; move it out")
