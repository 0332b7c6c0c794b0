"""What the command line prints: one clear line, a table, JSON, a progress bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from syncline.abc import Observe, ignore
from syncline.sync.verify import Mismatch
from syncline.types import Step

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(nbytes: float) -> str:
    """Write a number of bytes with three digits and a decimal unit.

    Example:
        >>> size(512), size(2_345_678), size(999_960)
        ('512 B', '2.35 MB', '1 MB')
    """
    exponent = 0
    # What would be rounded up to 1000 is 1 of the next unit.
    while abs(nbytes) >= 999.5 and exponent < len(_UNITS) - 1:
        nbytes /= 1000
        exponent += 1
    return f"{nbytes:.3g} {_UNITS[exponent]}" if abs(nbytes) < 999.5 else f"{nbytes:,.0f} PB"


def show_json(value: Any) -> None:
    """Print one JSON value on a line of its own."""
    print(json.dumps(value, allow_nan=False), flush=True)


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str | None = None
) -> None:
    """Print a table; columns after the first are aligned to the right."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    # Piped output keeps whole rows: a file or grep has no width to fit.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def show_mismatches(title: str, mismatches: Sequence[Mismatch]) -> None:
    """Print where a directory differs from a version."""
    show_table(
        title,
        ("name", "problem", "elements that differ", "detail"),
        [
            (
                item.name,
                item.problem,
                "" if item.changed is None else f"{item.changed:,}",
                item.detail,
            )
            for item in mismatches
        ],
    )


def show_line(text: str) -> None:
    """Print one line of plain text."""
    print(text, flush=True)


def seconds(phases: Mapping[str, float]) -> str:
    """Write phase times in the order in which they took most.

    Example:
        >>> seconds({"put": 0.5, "diff": 1.25, "total": 1.8})
        '1.80 s (diff 1.25, put 0.50)'
    """
    parts = sorted(((s, name) for name, s in phases.items() if name != "total"), reverse=True)
    inside = ", ".join(f"{name} {s:.2f}" for s, name in parts if s >= 0.005)
    return f"{phases['total']:.2f} s" + (f" ({inside})" if inside else "")


@contextmanager
def progress(what: str, *, is_quiet: bool) -> Iterator[Observe]:
    """Yield an observer that draws a bar on standard error, if that is a terminal."""
    if is_quiet or not sys.stderr.isatty():
        yield ignore
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)

        def observe(step: Step) -> None:
            if step.total_bytes:
                bar.update(task, completed=step.done_bytes, total=step.total_bytes)

        yield observe
