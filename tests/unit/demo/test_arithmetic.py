from __future__ import annotations

import pytest

from syncline.demo.arithmetic import SUMS, Problem, problems, reward


def test_problems_are_different_ones_and_the_same_for_the_same_seed_and_step() -> None:
    first = problems(8, seed=3, step=5)
    assert first == problems(8, seed=3, step=5)
    assert len(set(first)) == 8
    assert first != problems(8, seed=3, step=6)
    assert first != problems(8, seed=4, step=5)


def test_every_sum_can_be_asked_at_once() -> None:
    assert {(one.a, one.b) for one in problems(len(SUMS), seed=0, step=1)} == set(SUMS)


@pytest.mark.parametrize(
    ("completion", "earned"),
    [
        ("13\n", 1.0),
        (" 13 \n", 1.0),
        ("13\n4+4=", 1.0),
        ("13", 0.0),
        ("1\n", 0.0),
        ("131\n", 0.0),
        ("13+1\n", 0.0),
        ("\n13\n", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_answer_alone_on_an_ended_line_earns(completion: str, earned: float) -> None:
    assert reward(Problem(6, 7), completion) == earned
