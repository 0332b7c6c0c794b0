"""The task that the demo trains: sums of two digits, with a reward that a line of code can check.

A prompt shows one solved sum and asks for another; a completion earns 1 when its first line is the
answer and nothing else. A pretrained model is right about four times in ten, mostly because it goes
on to write something else on the line, so the reward has room to rise.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SUMS = tuple((a, b) for a in range(1, 10) for b in range(1, 10))
"""Every sum that can be asked for."""

LINE_END = "\n"
"""What a completion must write after the answer; generation stops there."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum: `a + b`."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        r"""The text that the model completes.

        Example:
            >>> Problem(3, 4).prompt
            '1+1=2\n3+4='
        """
        return f"1+1=2{LINE_END}{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """The digits of the sum."""
        return str(self.a + self.b)


def problems(count: int, *, seed: int, step: int) -> list[Problem]:
    """Return `count` different problems, always the same for the same seed and step."""
    # Seeding by a string is the documented way to mix two numbers that stays the same everywhere.
    generator = random.Random(f"{seed}/{step}")  # noqa: S311 - reproducible, not secret
    return [Problem(a, b) for a, b in generator.sample(SUMS, count)]


def reward(problem: Problem, completion: str) -> float:
    r"""Return 1.0 if the completion's first line is the answer and is ended, else 0.0.

    Example:
        >>> reward(Problem(3, 4), "7\n"), reward(Problem(3, 4), "7+1"), reward(Problem(3, 4), "7")
        (1.0, 0.0, 0.0)
    """
    line, end, _ = completion.partition(LINE_END)
    return 1.0 if end and line.strip(" ") == problem.answer else 0.0
