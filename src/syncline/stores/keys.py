"""Which keys a store takes: relative POSIX paths that cannot leave it or meet its own hidden files."""

from __future__ import annotations

from syncline.errors import ConfigError

_MAX_SEGMENT_BYTES = 255


def split(key: str) -> list[str]:
    """Return the segments of a legal key.

    A segment is not empty, does not begin with a dot (stores hide their own files that way, and `.`
    and `..` go with it), and holds no backslash or control character.

    Raises:
        ConfigError: the key breaks a rule; nothing was read or written.

    Example:
        >>> split("weight_v000001/manifest.json")
        ['weight_v000001', 'manifest.json']
    """
    segments = key.split("/")
    for segment in segments:
        fault = _fault(segment)
        if fault is not None:
            raise ConfigError(
                f"key {key!r:.300}: a segment {fault}; expected a relative path such as "
                "weight_v000001/manifest.json"
            )
    return segments


def check_prefix(prefix: str) -> None:
    """Check that a prefix can begin a legal key.

    Raises:
        ConfigError: it cannot.
    """
    *whole, last = prefix.split("/")
    split("/".join([*whole, last + "x"]))


def _fault(segment: str) -> str | None:
    if not segment:
        return "is empty"
    if segment.startswith("."):
        return "begins with a dot"
    if any(
        character == "\\" or ord(character) < 0x20 or ord(character) == 0x7F
        for character in segment
    ):
        return "holds a backslash or a control character"
    try:
        nbytes = len(segment.encode())
    except UnicodeEncodeError:
        return "is not text that UTF-8 can hold"
    return f"is longer than {_MAX_SEGMENT_BYTES} bytes" if nbytes > _MAX_SEGMENT_BYTES else None
