"""The `__metadata__` of a TRL patch, whose values are strings as Python prints them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.errors import FormatError
from syncline.format import names, strict_json

_ALWAYS = (
    "format",
    "version",
    "sparse",
    "model_version",
    "num_changed_params",
    "total_changed_elements",
    "total_elements",
    "sparsity",
)
_CHANGED, _ENCODING = "changed_params", "encoding"
_ENCODINGS = ("raw", "gap_delta")
_DIGITS = re.compile(r"0|[1-9][0-9]{0,18}")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")
_MAX_LIST_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a patch says of itself.

    Attributes:
        model_version: the step.
        encoding: of the positions: `raw` or `gap_delta`; generation 1 knows `raw` alone.
        suffixes: of the names of positions and of values.
        changed_params: names of the changed tensors; None of generation 3, which does not list them.
        changed_count, changed_elements: how many tensors and elements the patch carries.
    """

    model_version: int
    encoding: str
    suffixes: tuple[str, str]
    changed_params: tuple[str, ...] | None
    changed_count: int
    changed_elements: int

    def check_totals(self, found: Sequence[str], elements: int, where: str) -> None:
        """Check that a patch carries what it says.

        Args:
            found: names of the changed tensors, sorted.

        Raises:
            FormatError: other tensors, or another number of them or of their elements.
        """
        place = f"{where}: {names.METADATA}"
        if self.changed_params is not None and sorted(self.changed_params) != list(found):
            odd = min(set(self.changed_params) ^ set(found), default="a name that is listed twice")
            raise FormatError(
                f"{place}.{_CHANGED} must list the tensors of the file, found {odd!r:.80} in one of them "
                "alone"
            )
        if self.changed_count != len(found):
            raise FormatError(
                f"{place}.num_changed_params must be {len(found)}, found {self.changed_count}"
            )
        if self.changed_elements != elements:
            raise FormatError(
                f"{place}.total_changed_elements must be {elements}, found {self.changed_elements}"
            )


def load(metadata: Mapping[str, str], where: str, *, is_delta: bool) -> Metadata:
    """Return what the metadata of an anchor or a delta says.

    Raises:
        FormatError: an unknown or a missing key, or a value that is not allowed; names file and field.
    """
    place = f"{where}: {names.METADATA}"
    for key in _ALWAYS:
        if key not in metadata:
            raise FormatError(f"{place}.{key} is missing")
    for key in metadata:
        if key not in (*_ALWAYS, _CHANGED, _ENCODING):
            known = ", ".join((*_ALWAYS, _CHANGED, _ENCODING))
            raise FormatError(f"{place}.{key:.80} is not a known key; known are {known}")
    _word(metadata, "format", ("sparse_weight_patch",), place)
    _word(metadata, "version", ("1", "3"), place)
    _word(metadata, "sparse", ("True" if is_delta else "False",), place)
    _number(metadata, "sparsity", place)
    _count(metadata, "total_elements", place)
    changed = None
    if _CHANGED in metadata:
        changed = _names(metadata[_CHANGED], f"{place}.{_CHANGED}")
    return Metadata(
        model_version=_count(metadata, "model_version", place),
        encoding=_encoding(metadata, place),
        suffixes=(".idx", ".val") if _ENCODING in metadata else (".indices", ".values"),
        changed_params=changed,
        changed_count=_count(metadata, "num_changed_params", place),
        changed_elements=_count(metadata, "total_changed_elements", place),
    )


def _encoding(metadata: Mapping[str, str], place: str) -> str:
    found = metadata.get(_ENCODING, "raw")
    if found == "nvcomp_cascaded":
        raise FormatError(
            f"{place}.{_ENCODING} is 'nvcomp_cascaded': positions in a format of nvCOMP that only a GPU "
            "library reads; publish with encoding 'gap_delta' or 'raw'"
        )
    _word({_ENCODING: found}, _ENCODING, _ENCODINGS, place)
    return found


def _word(metadata: Mapping[str, str], key: str, words: tuple[str, ...], place: str) -> None:
    if metadata[key] not in words:
        raise FormatError(
            f"{place}.{key} must be {' or '.join(map(repr, words))}, found {metadata[key]!r:.80}"
        )


def _count(metadata: Mapping[str, str], key: str, place: str) -> int:
    if _DIGITS.fullmatch(metadata[key]) is None:
        raise FormatError(f"{place}.{key} must be a whole number, found {metadata[key]!r:.80}")
    return int(metadata[key])


def _number(metadata: Mapping[str, str], key: str, place: str) -> None:
    if _NUMBER.fullmatch(metadata[key]) is None:
        raise FormatError(f"{place}.{key} must be a number, found {metadata[key]!r:.80}")


def _names(text: str, place: str) -> tuple[str, ...]:
    found = []
    for name in strict_json.items(
        strict_json.parse(text.encode(), place, limit_bytes=_MAX_LIST_BYTES), place
    ):
        if not isinstance(name, str):
            raise FormatError(f"{place} must list names, found {name!r:.80}")
        names.check_tensor(name, place)
        found.append(name)
    return tuple(found)
