"""The page on vLLM says what the code says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from syncline.serving.metrics import METRICS
from syncline.vllm import versions
from syncline.vllm.commit import CommitOptions, Committed
from syncline.vllm.extension import SynclineWorker
from syncline.vllm.server import figures_of

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "vllm.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    return re.findall(r"(?m)^\| `?([\w.]+)", text)


def test_supported_versions():
    assert tuple(first_cells(section("Supported versions"))[1:]) == versions.KNOWN


def test_settings_and_their_defaults():
    rows = dict(re.findall(r"(?m)^\| `(\w+)` \| `?(\w[\w.]*)`? \| ", section("A commit")))
    assert rows == {
        f.name: f"{f.default:g}" if isinstance(f.default, float) else f.default
        for f in fields(CommitOptions)
    }


def test_methods():
    listed = re.findall(r"(?m)^\| `(syncline_\w+)\(", section("Methods of the workers"))
    assert sorted(listed) == sorted(n for n in vars(SynclineWorker) if n.startswith("syncline_"))


def test_metrics():
    rows = dict(re.findall(r"(?m)^\| `(syncline_\w+)` \| (\w+) \|", section("Metrics")))
    assert rows.items() <= {name: kind for name, (kind, _) in METRICS.items()}.items()
    done = Committed(7, stage_s=1.0, pause_s=0.5, apply_s=0.4)
    assert set(rows) >= figures_of(done).keys() | {"syncline_ready", "syncline_version"}
