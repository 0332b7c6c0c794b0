"""What the demo shows while it runs: a table that grows by a row a step, or JSON lines.

Rows are printed as they come, so the table reads the same in a terminal, a pipe and a CI log; in a
terminal a line below it says what is being done right now. Setting up takes a minute or two, so elsewhere
what is being done until then is printed too: a silent program looks like one that hangs.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from syncline.demo.config import BaseReport, DemoResult, StepReport

if TYPE_CHECKING:
    from rich.console import Console

MS = 1000.0
KB = 1000.0
MB = 1e6

Cell = Callable[[StepReport], str]

COLUMNS: tuple[tuple[str, str, int, Cell], ...] = (
    ("step", "", 4, lambda r: f"{r.step}"),
    ("reward", "", 6, lambda r: f"{r.reward:.3f}"),
    ("changed", "%", 7, lambda r: f"{100 * r.density:.3f}"),
    ("payload", "kB", 7, lambda r: f"{r.payload_bytes / KB:,.0f}"),
    ("smaller", "times", 7, lambda r: f"{r.times_smaller:,.1f}"),
    ("diff", "ms", 5, lambda r: f"{MS * r.diff_s:.0f}"),
    ("encode", "ms", 6, lambda r: f"{MS * r.encode_s:.0f}"),
    ("publish", "ms", 7, lambda r: f"{MS * r.publish_s:.0f}"),
    ("pull", "ms", 5, lambda r: f"{MS * r.pull_s:.0f}"),
    ("apply", "ms", 5, lambda r: f"{MS * r.apply_s:.0f}"),
    ("verify", "ms", 6, lambda r: f"{MS * r.verify_s:.0f}"),
    ("pause", "ms", 5, lambda r: f"{MS * r.pause_s:.0f}"),
    ("total", "s", 5, lambda r: f"{r.step_s:.1f}"),
)
"""Heading, unit, width and content of each column of the table."""


class Display(ABC):
    """Where a run reports to."""

    @abstractmethod
    def phase(self, doing: str) -> None:
        """Say what is being done from now on."""

    @abstractmethod
    def base(self, report: BaseReport) -> None:
        """Show the checkpoint that the run starts from."""

    @abstractmethod
    def step(self, report: StepReport) -> None:
        """Show a finished step."""

    @abstractmethod
    def result(self, result: DemoResult) -> None:
        """Show what the run found."""

    def live(self) -> AbstractContextManager[Any]:
        """Return the context in which all the others are called."""
        return nullcontext()


class JsonDisplay(Display):
    """One JSON object a line, with `kind` saying which; the last has `bit_identical`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def phase(self, doing: str) -> None:
        """Say nothing: phases are for people."""

    def base(self, report: BaseReport) -> None:
        """Write the line of kind `base`."""
        self._line("base", asdict(report))

    def step(self, report: StepReport) -> None:
        """Write a line of kind `step`."""
        derived = {
            "density": report.density,
            "times_smaller": report.times_smaller,
            "pause_s": report.pause_s,
        }
        self._line("step", asdict(report) | derived)

    def result(self, result: DemoResult) -> None:
        """Write the line of kind `result`."""
        steps = result.steps
        self._line(
            "result",
            {
                "bit_identical": result.bit_identical,
                "differences": dict(result.differences),
                "tensors": result.tensors,
                "steps": len(steps),
                "reward_first": steps[0].reward,
                "reward_last": steps[-1].reward,
                "changed": sum(step.changed for step in steps),
                "payload_bytes": result.payload_bytes,
                "full_bytes": result.full_bytes,
                "times_smaller": result.times_smaller,
                "picture": str(result.picture),
                "out": None if result.out is None else str(result.out),
                "total_s": result.total_s,
            },
        )

    def _line(self, kind: str, content: dict[str, Any]) -> None:
        self._stream.write(json.dumps({"kind": kind} | content, allow_nan=False) + "\n")
        self._stream.flush()


class TableDisplay(Display):
    """A table on a rich console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting")
        self._is_set_up = False

    def live(self) -> AbstractContextManager[Any]:
        """Return the context that keeps the status line on the terminal."""
        return self._status

    def phase(self, doing: str) -> None:
        """Change the status line; print it where there is none."""
        self._status.update(f"[dim]{doing}[/dim]")
        if not (self._console.is_terminal or self._is_set_up):
            self._console.print(f"{doing} ...", highlight=False)

    def base(self, report: BaseReport) -> None:
        """Print what is trained, then the head of the table."""
        self._is_set_up = True
        cut = (
            f", vocabulary cut from {report.vocabulary_before:,} to {report.vocabulary:,} tokens"
            if report.vocabulary < report.vocabulary_before
            else f", {report.vocabulary:,} tokens"
        )
        noise = ", noise of one quantisation step added" if report.is_dithered else ""
        self._text(
            f"{report.model}: {report.parameters:,} weights in {report.tensors} tensors, "
            f"{report.full_bytes / MB:,.1f} MB of BF16{cut}{noise}.\n"
            f"Trainer computes in {report.compute_dtype}; set up in {report.setup_s:.0f} s."
        )
        self._row([heading for heading, *_ in COLUMNS], "bold")
        self._row([unit for _, unit, *_ in COLUMNS], "dim")

    def step(self, report: StepReport) -> None:
        """Print a row."""
        self._row([cell(report) for *_, cell in COLUMNS])

    def result(self, result: DemoResult) -> None:
        """Print the verdict, each tensor that differs, the totals, and where the picture is."""
        steps = result.steps
        self._text(
            f"{len(steps)} versions: {result.payload_bytes / MB:,.1f} MB sent in place of "
            f"{result.full_bytes / MB:,.1f} MB, {result.times_smaller:,.1f} times smaller; reward "
            f"{steps[0].reward:.2f} -> {steps[-1].reward:.2f}; {result.total_s:.0f} s in all."
        )
        for name, difference in result.differences.items():
            self._text(f"{name}: {difference}", "red")
        if result.bit_identical:
            self._text(
                f"Bit-identical: all {result.tensors} tensors in the engine process have the "
                "SHA-256 of the trainer's.",
                "bold green",
            )
        else:
            self._text(
                f"NOT bit-identical: {len(result.differences)} of {result.tensors} tensors differ.",
                "bold red",
            )
        self._text(f"Picture: {result.picture}")

    def _row(self, cells: list[str], style: str = "") -> None:
        widths = [width for _, _, width, _ in COLUMNS]
        line = " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        self._console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)

    def _text(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
