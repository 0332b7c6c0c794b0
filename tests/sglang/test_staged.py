"""Orders and answers in the staging directory: what is written is read, what is not legal is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from syncline.errors import CommitError, FormatError, LayoutError
from syncline.sglang import staged, worker
from syncline.sglang.change import check_held
from syncline.sglang.staged import Answer, Order
from syncline.types import ZERO, Fingerprint
from syncline.version import PartEntry

PRINTS = {"w": (ZERO, Fingerprint.from_hex("ab" * 16))}
ORDER = Order("ab", "apply", "/model", (PartEntry("journal-0", 9, "c" * 64),), PRINTS)
HELD = {"w": ((4, 2), (((0, 0), (2, 2)),)), "gone": ((3,), ())}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    staged.write_order(tmp_path, ORDER)
    assert staged.read_order(tmp_path) == ORDER
    answers = [
        Answer("ab", 0, None, False, 7, {"x": "why"}, HELD),
        Answer("ab", 1, "it broke", True, 0, {}, {}),
        Answer("ab", 2, "it is another", False, 0, {}, {}, is_strange=True),
    ]
    for answer in answers:
        staged.write_answer(tmp_path, answer)
    assert staged.read_answers(tmp_path, "ab", 3) == answers
    with pytest.raises(CommitError, match="expected a file, found none"):
        staged.read_answers(tmp_path, "ab", 4)
    staged.forget_answers(tmp_path)
    assert not staged.has_answers(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"act": "delete"},
        {"act": None},
        {"journals": [["../../etc/passwd", 1, "c"]]},
        {"journals": [["journal-0", -1, "c"]]},
        {"journals": [["journal-0", 1, None]]},
        {"journals": "journal-0"},
        {"prints": {"w": ["0" * 32]}},
        {"prints": {"w": ["0" * 32, "x" * 32]}},
        {"prints": {"w": ["0" * 32, 7]}},
        {"prints": None},
    ],
)
def test_an_order_that_is_not_legal_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    staged.write_order(tmp_path, ORDER)
    document = json.loads((tmp_path / staged.ORDER).read_text())
    (tmp_path / staged.ORDER).write_text(json.dumps({**document, **change}))
    with pytest.raises(FormatError):
        staged.read_order(tmp_path)


def test_a_loader_never_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's scheduler would die of it."""
    monkeypatch.delenv("SYNCLINE_SGLANG_STAGING", raising=False)
    worker.load(object(), [])
    assert "no answer could be given" in caplog.text


def test_a_rank_that_cannot_obey_says_why(tmp_path: Path) -> None:
    staged.write_order(tmp_path, ORDER)
    answer = worker.obey(object(), tmp_path, 3)
    assert answer.rank == 3 and answer.error is not None
    assert json.loads((tmp_path / "answer-ab-3.json").read_text())["error"] == answer.error


def held(*boxes: tuple[tuple[int, int], tuple[int, int]]) -> Answer:
    return Answer("ab", 0, held={"w": ((4, 2), boxes)})


@pytest.mark.parametrize(
    "answers, match",
    [
        ([held(((0, 0), (2, 2))), held(((2, 0), (2, 2)))], None),
        ([held(((0, 0), (4, 2))), held(((0, 0), (4, 2)))], None),
        ([held(((0, 0), (2, 2))), held()], "drops a part of it"),
        ([held(), held()], "drops it"),
        ([held(), Answer("ab", 1, dense={"w": "it is padded"}, held={})], None),
        ([held(((0, 0), (3, 2))), held(((2, 0), (2, 2)))], "do not fit each other"),
    ],
)
def test_ranks_must_hold_a_changed_tensor_together(
    answers: list[Answer], match: str | None
) -> None:
    if match is None:
        check_held(answers)
        return
    with pytest.raises(LayoutError, match=match):
        check_held(answers)
