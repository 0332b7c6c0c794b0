"""The only door to JSON: nothing repeated, unknown, missing, rounded or oversized gets through.

Messages begin with the file and the path of the member inside it, such as `manifest.json:
tensors[3].part`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NoReturn

from syncline.errors import FormatError
from syncline.format.names import FORMAT_VERSION, MAX_INTEGER

_HEX = re.compile(r"[0-9a-f]+")

MAX_FLOAT = 1.7976931348623157e308


def parse(data: bytes, where: str, *, limit_bytes: int) -> object:
    """Return the value that the UTF-8 JSON text `data` stands for.

    Args:
        data: the whole file.
        where: file name, for messages.
        limit_bytes: largest text that is looked at.

    Raises:
        FormatError: too long, not UTF-8, a byte-order mark, not JSON, nested too deeply, a repeated
            key, NaN or an infinity.
    """
    if len(data) > limit_bytes:
        raise FormatError(f"{where}: at most {limit_bytes} bytes are allowed, found {len(data)}")

    try:
        return _load(data.decode(), where)
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise FormatError(f"{where}: not JSON at character {error.pos}: {error.msg}") from None
    except RecursionError:
        raise FormatError(f"{where}: nested too deeply") from None
    except FormatError:
        raise
    except ValueError as error:  # an integer with more digits than Python converts
        raise FormatError(f"{where}: {error}") from None


def _load(text: str, where: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members: dict[str, object] = {}
        for key, value in pairs:
            if key in members:
                raise FormatError(f"{where}: key {key!r:.80} is there twice in one object")
            members[key] = value
        return members

    def refuse_constant(constant: str) -> NoReturn:
        raise FormatError(f"{where}: a number must be finite, found {constant}")

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant)


def dump(document: object) -> bytes:
    """Return the canonical text of a document: sorted keys, no spaces, UTF-8, one final newline.

    Example:
        >>> dump({"b": [1, None], "a": "é"}).decode().rstrip()
        '{"a":"é","b":[1,null]}'

    Raises:
        FormatError: JSON cannot say it.
    """
    try:
        text = json.dumps(
            document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return f"{text}\n".encode()
    except (TypeError, ValueError) as error:
        raise FormatError(f"this document cannot be written as JSON: {error}") from error


def document(
    data: bytes, where: str, name: str, keys: Collection[str], *, limit_bytes: int
) -> Fields:
    """Return the outermost object of a document that says its `format` and `format_version`.

    Args:
        data: the whole file.
        where: file name, for messages.
        name: what `format` must say.
        keys: every key that must be there, `format` and `format_version` included.
        limit_bytes: largest file that is looked at.

    Raises:
        FormatError: another format, a version that this release does not know, or what `parse` and
            `Fields` refuse.
    """
    value = parse(data, where, limit_bytes=limit_bytes)
    version = members(value, where).get("format_version", FORMAT_VERSION)
    if type(version) is int and version > FORMAT_VERSION:
        raise FormatError(
            f"{where}: format_version must be {FORMAT_VERSION}, found {version}: a newer Syncline "
            "wrote it; upgrade"
        )
    fields = Fields(value, where, keys)
    fields.word("format", name)
    fields.integer("format_version", minimum=FORMAT_VERSION, maximum=FORMAT_VERSION)
    return fields


class Fields:
    """One JSON object with exactly the given keys, whose members are checked as they are taken.

    Args:
        value: what the parser returned.
        where: file name, for messages.
        keys: the keys that must be there, and no others.
        path: of the object inside the file, for messages; empty for the outermost one.

    Raises:
        FormatError: not an object; an unknown or a missing key.
    """

    __slots__ = ("_members", "_prefix")

    def __init__(self, value: object, where: str, keys: Collection[str], path: str = "") -> None:
        self._members = members(value, f"{where}: {path}" if path else where)
        self._prefix = f"{where}: {path}." if path else f"{where}: "
        if self._members.keys() != set(keys):
            for key in self._members:
                if key not in keys:
                    raise FormatError(
                        f"{self._prefix}{key:.80} is not a known key; known are {sorted(keys)}"
                    )
            missing = min(set(keys) - self._members.keys())
            raise FormatError(f"{self._prefix}{missing} is missing")

    def __getitem__(self, key: str) -> object:
        return self._members[key]

    def place(self, key: str) -> str:
        """Return file and path of a member, as messages name it."""
        return f"{self._prefix}{key}"

    def integer(self, key: str, *, minimum: int = 0, maximum: int = MAX_INTEGER) -> int:
        """Return a plain integer in `minimum..maximum`."""
        return integer(self[key], self.place(key), minimum=minimum, maximum=maximum)

    def text(self, key: str) -> str:
        """Return a string."""
        value = self[key]
        if not isinstance(value, str):
            self.refuse(key, "a string")
        return value

    def word(self, key: str, *words: str) -> str:
        """Return a string that is one of `words`."""
        value = self.text(key)
        if value not in words:
            self.refuse(key, " or ".join(repr(word) for word in words))
        return value

    def hexadecimal(self, key: str, digits: int) -> str:
        """Return a string of so many lowercase hexadecimal digits."""
        value = self.text(key)
        if len(value) != digits or _HEX.fullmatch(value) is None:
            self.refuse(key, f"{digits} lowercase hexadecimal digits")
        return value

    def items(self, key: str) -> list[object]:
        """Return a list."""
        return items(self[key], self.place(key))

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise the error that says what the member should have been."""
        raise FormatError(f"{self.place(key)} must be {expected}, found {self[key]!r:.80}")


def members(value: object, where: str) -> dict[str, Any]:
    """Return `value` as a JSON object with keys of any name.

    Raises:
        FormatError: it is something else.
    """
    if not isinstance(value, dict):
        raise FormatError(f"{where} must be an object, found {value!r:.80}")
    return value


def items(value: object, where: str) -> list[object]:
    """Return `value` as a JSON list.

    Raises:
        FormatError: it is something else.
    """
    if not isinstance(value, list):
        raise FormatError(f"{where} must be a list, found {value!r:.80}")
    return value


def integer(value: object, where: str, *, minimum: int = 0, maximum: int = MAX_INTEGER) -> int:
    """Return `value` as a plain integer in `minimum..maximum`.

    Raises:
        FormatError: it is something else; `true`, `1.0` and `1e0` are not plain integers.
    """
    if type(value) is not int or not minimum <= value <= maximum:
        raise FormatError(
            f"{where} must be an integer from {minimum} to {maximum}, found {value!r:.80}"
        )
    return value


def number(value: object, where: str) -> float:
    """Return `value` as a finite float.

    Raises:
        FormatError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_FLOAT:
        raise FormatError(f"{where} must be a finite number, found {value!r:.80}")
    return float(value)
