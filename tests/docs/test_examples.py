"""Every Python block in README and docs runs, each page in a fresh directory, top to bottom."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)
    # The page's program ends here, and with it what it has open.
    for value in [
        one for each in names.values() for one in (each if isinstance(each, list) else [each])
    ]:
        if type(value).__module__.startswith("syncline.") and hasattr(value, "close"):
            value.close()


@pytest.mark.parametrize(
    "name", sorted(page.stem for page in (ROOT / "docs" / "how-to").glob("*.md"))
)
def test_a_page_runs_again_where_it_was_tried_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "how-to" / f"{name}.md"
    for _ in range(2):
        test_python_blocks_run(page, tmp_path, monkeypatch)


def test_readme_has_a_quickstart() -> None:
    assert len(blocks(ROOT / "README.md", "python")) >= 1


def test_make_commands_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {
        shlex.split(line)[1]
        for code in blocks(ROOT / "README.md", "sh")
        for line in code.splitlines()
        if line.startswith("make ")
    }
    assert {"demo", "test"} <= used <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
