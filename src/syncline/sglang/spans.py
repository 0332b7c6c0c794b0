"""Which version made which token of an answer: what a trajectory keeps beside its log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from syncline.errors import FormatError
from syncline.format import strict_json


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens `start:stop` were made by the weights with this name.

    Attributes:
        label: the weight version's name; the version's number where Syncline named it.
        start, stop: indices of output tokens.
    """

    label: str
    start: int
    stop: int

    @property
    def version(self) -> int | None:
        """The number of the version; None where something else than Syncline named the weights."""
        is_number = self.label.isascii() and self.label.isdigit()
        return int(self.label) if is_number else None


def of_answer(answer: Mapping[str, Any], tokens: int) -> tuple[Span, ...]:
    """Return the spans of an answer, which tile its output.

    Args:
        answer: of `/generate`, or of an OpenAI route.
        tokens: how many output tokens it has.

    Raises:
        FormatError: the server tells no spans (before 0.5.20 none does), or they do not tile the output.

    Example:
        >>> meta = {"weight_versions": [{"version": "4", "start": 0, "end": 3}, {"version": "5", "start": 3, "end": 8}]}
        >>> [(span.version, span.start, span.stop) for span in of_answer({"meta_info": meta}, 8)]
        [(4, 0, 3), (5, 3, 8)]
    """
    where = "answer: weight_versions"
    members = answer.get("meta_info", answer.get("metadata"))
    listed = strict_json.members(members, "answer").get("weight_versions")
    if listed is None:
        raise FormatError(f"{where}: expected spans, found none; SGLang tells them from 0.5.20 on")
    found = [_span(value, where) for value in strict_json.items(listed, where)]
    edges = [0, *(span.stop for span in found)]
    if edges[-1] != tokens or any(
        span.start != edge for span, edge in zip(found, edges, strict=False)
    ):
        raise FormatError(
            f"{where}: expected spans that tile {tokens} tokens, found {found!r:.300}"
        )
    return tuple(found)


def _span(value: object, where: str) -> Span:
    members = strict_json.members(value, where)
    label = members.get("version")
    if not isinstance(label, str):
        raise FormatError(f"{where}: version must be a string, found {label!r:.80}")
    start = strict_json.integer(members.get("start"), where)
    return Span(label, start, strict_json.integer(members.get("end"), where, minimum=start))
