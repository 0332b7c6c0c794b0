"""How things in a run are called: version directories, parts, and which file names are legal."""

from __future__ import annotations

import re
import unicodedata

from syncline.errors import FormatError

HEAD = "HEAD.json"
LIVE = "LIVE.json"
MANIFEST = "manifest.json"
SIDECAR = "tensors.json.zst"
INDEX = "model.safetensors.index.json"
VERSION_PREFIX = "weight_v"
PART_SUFFIX = ".safetensors"
METADATA = "__metadata__"

FORMAT_VERSION = 1
"""Of `HEAD.json` and `manifest.json`; written one at a time, read for ever."""

MAX_INTEGER = (1 << 63) - 1
"""Largest version, epoch, size or count: what a signed 64-bit reader can hold."""

_RESERVED = frozenset({HEAD, LIVE, MANIFEST, SIDECAR, INDEX})
_VERSION_DIR = re.compile(VERSION_PREFIX + "([0-9]{6,19})")
_MAX_PATH_BYTES = 255
_MAX_NAME_BYTES = 4096


def version_dir(version: int) -> str:
    """Return the directory name of a version.

    Example:
        >>> version_dir(7), version_dir(12345678)
        ('weight_v000007', 'weight_v12345678')
    """
    return f"{VERSION_PREFIX}{version:06d}"


def version_of(directory: str) -> int | None:
    """Return the version that a directory name stands for; None if it is not a version's name.

    Example:
        >>> version_of("weight_v000007"), version_of("weight_v7"), version_of("weight_v0000007")
        (7, None, None)
    """
    match = _VERSION_DIR.fullmatch(directory)
    if match is None:
        return None
    version = int(match[1])
    return version if 1 <= version <= MAX_INTEGER and version_dir(version) == directory else None


def key(version: int, file: str) -> str:
    """Return the store key of one file of a version.

    Example:
        >>> key(7, "manifest.json")
        'weight_v000007/manifest.json'
    """
    return f"{version_dir(version)}/{file}"


def scores_key(version: int) -> str:
    """Return the store key of the trainer's scores of a version; they lie outside its directory.

    Example:
        >>> scores_key(7)
        'scores/weight_v000007.json'
    """
    return f"scores/{version_dir(version)}.json"


def part_name(index: int, count: int) -> str:
    """Return the file name of part `index`, from 0, of `count`.

    Example:
        >>> part_name(0, 2)
        'model-00000-of-00002.safetensors'
    """
    return f"model-{index:05d}-of-{count:05d}{PART_SUFFIX}"


def is_part(value: object) -> bool:
    """Tell whether a value is the name of a safetensors file in one directory, and cannot leave it.

    Example:
        >>> is_part("model-00000-of-00001.safetensors"), is_part("../model.safetensors"), is_part(3)
        (True, False, False)
    """
    if not isinstance(value, str) or not value.endswith(PART_SUFFIX):
        return False
    return not value.startswith(".") and not any(sign in value for sign in "/\\\0")


def check_file(path: str, where: str) -> None:
    """Check that `path` may name a checkpoint's further file: one plain name inside its directory.

    Raises:
        FormatError: it could leave the directory, is hidden, or is a name that the format uses.
    """
    if not path or path.startswith(".") or "/" in path or "\\" in path or _has_control(path):
        raise FormatError(
            f"{where} must be one plain file name inside the version directory, not starting with "
            f"a dot, found {path!r}"
        )
    if _utf8_bytes(path, where) > _MAX_PATH_BYTES:
        raise FormatError(f"{where} must be at most {_MAX_PATH_BYTES} bytes, found {path!r:.80}")
    if path in _RESERVED or path.endswith(PART_SUFFIX):
        raise FormatError(f"{where} must not be a name that the format uses itself, found {path!r}")


def check_tensor(name: str, where: str) -> None:
    """Check that `name` may be a tensor's canonical name.

    Raises:
        FormatError: it is empty, longer than 4096 bytes, or `__metadata__`.
    """
    if not name or name == METADATA:
        raise FormatError(f"{where} must be a tensor's name, found {name!r}")
    if _utf8_bytes(name, where) > _MAX_NAME_BYTES:
        raise FormatError(f"{where} must be at most {_MAX_NAME_BYTES} bytes, found {name!r:.80}...")


def check_identity(text: object, where: str) -> str:
    """Return `text` if it may be what another project calls a version: 1 to 255 bytes of plain text.

    Raises:
        FormatError: it is something else.
    """
    if not isinstance(text, str) or not text or _has_control(text):
        raise FormatError(
            f"{where} must be a string of 1 to {_MAX_PATH_BYTES} bytes without control characters, found "
            f"{text!r:.80}"
        )
    if _utf8_bytes(text, where) > _MAX_PATH_BYTES:
        raise FormatError(f"{where} must be at most {_MAX_PATH_BYTES} bytes, found {text!r:.80}")
    return text


def _has_control(text: str) -> bool:
    return any(unicodedata.category(character) == "Cc" for character in text)


def _utf8_bytes(text: str, where: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise FormatError(f"{where} must be text that UTF-8 can hold, found {text!r:.80}") from None
