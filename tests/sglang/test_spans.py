"""Version spans of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.errors import FormatError
from syncline.sglang.spans import Span, of_answer


def answer(*spans: tuple[Any, Any, Any]) -> dict[str, Any]:
    listed = [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]
    return {"weight_versions": listed}


@pytest.mark.parametrize("member", ["meta_info", "metadata"])
def test_both_kinds_of_answers_tell_spans(member: str) -> None:
    found = of_answer({member: answer(("v0", 0, 2), ("7", 2, 9))}, 9)
    assert found == (Span("v0", 0, 2), Span("7", 2, 9))
    assert [span.version for span in found] == [None, 7]


@pytest.mark.parametrize(
    "spans, tokens",
    [
        ((), 3),
        ((("1", 0, 2),), 3),
        ((("1", 1, 3),), 3),
        ((("1", 0, 2), ("2", 1, 3)), 3),
        ((("1", 0, 1), ("2", 2, 3)), 3),
        (((1, 0, 3),), 3),
        ((("1", 0, -3),), 3),
        ((("1", False, 3),), 3),
    ],
)
def test_spans_that_do_not_tile_the_output_are_refused(spans: Any, tokens: int) -> None:
    with pytest.raises(FormatError):
        of_answer({"meta_info": answer(*spans)}, tokens)


def test_a_server_without_spans_is_said_to_be_one() -> None:
    with pytest.raises(FormatError, match=r"from 0\.5\.20 on"):
        of_answer({"meta_info": {"weight_version": "1"}}, 3)
