"""An environment in which vLLM finds Syncline's plugin, whether Syncline is installed or run from its source."""

from __future__ import annotations

import os
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROUP = "vllm.general_plugins"


def plugin_path(directory: Path) -> list[str]:
    """Return what must be on a path so that vLLM finds the plugin: nothing, if Syncline is installed."""
    if any(point.name == "syncline" for point in entry_points(group=GROUP)):
        return []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = directory / f"syncline-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: syncline\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return [str(directory)]


def with_plugin(directory: Path) -> dict[str, str]:
    """Return this process's environment, and in `directory` what an installation would have written."""
    paths = [str(ROOT / "src"), str(ROOT / "tests"), *plugin_path(directory / "plugin")]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}
