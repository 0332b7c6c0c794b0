"""Pages that repeat what the code says are compared with it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import syncline
from syncline import config, errors
from syncline.cli import group
from syncline.sync.options import PublisherOptions

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_error_tree_is_the_same_in_code_docstring_and_page() -> None:
    page = (DOCS / "reference" / "errors.md").read_text()
    doc = errors.__doc__
    assert doc is not None
    tree = [line.strip() for line in doc.splitlines() if "─" in line]
    assert tree == [line.strip() for line in page.splitlines() if "─" in line]
    drawn = {line.split("─ ")[1].split()[0] for line in tree}
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.SynclineError)
    }
    assert drawn == defined - {"SynclineError"}


def test_parents_in_the_drawing_are_the_parents_in_code() -> None:
    assert errors.__doc__ is not None
    stack: list[tuple[int, str]] = [(-1, "SynclineError")]
    for line in errors.__doc__.splitlines():
        if "─ " not in line:
            continue
        depth = line.index("─")
        name = line.split("─ ")[1].split()[0]
        while stack[-1][0] >= depth:
            stack.pop()
        assert getattr(errors, name).__mro__[1].__name__ == stack[-1][1]
        stack.append((depth, name))


def test_every_command_is_on_the_page() -> None:
    page = (DOCS / "reference" / "cli.md").read_text()
    for name in group.commands:
        assert f"`syncline {name}" in page


def test_every_setting_is_on_the_page() -> None:
    page = (DOCS / "reference" / "settings.md").read_text()
    listed = set(re.findall(r"(?m)^\| (`[a-z_`, ]+`) \|", page.split("## Environment")[0]))
    assert {name for row in listed for name in re.findall(r"[a-z_]+", row)} == {
        option.name for option in fields(PublisherOptions)
    }
    variables = set(re.findall(r"SYNCLINE_[A-Z_]+", Path(config.__file__).read_text()))
    assert set(re.findall(r"(?m)^\| `(SYNCLINE_[A-Z_]+)`", page)) == variables


def test_public_names_are_sorted_and_few() -> None:
    assert sorted(syncline.__all__) == syncline.__all__
    assert len(syncline.__all__) <= 25
    for name in syncline.__all__:
        assert getattr(syncline, name).__doc__


def test_every_page_is_in_the_contents_once() -> None:
    listed = re.findall(r"(?m)^- \[[^]]+\]\(([^)]+)\)", (DOCS / "README.md").read_text())
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages)
