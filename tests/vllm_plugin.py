"""An environment in which vLLM finds Syncline's plugin, whether Syncline is installed or run from its source."""

from __future__ import annotations

import os
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROUP = "vllm.general_plugins"


def with_plugin(directory: Path) -> dict[str, str]:
    """Return this process's environment, and in `directory` what an installation would have written."""
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    if not any(point.name == "syncline" for point in entry_points(group=GROUP)):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        info = directory / "plugin" / f"syncline-{project['version']}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: syncline\nVersion: {project['version']}\n"
        )
        lines = [f"{name} = {value}" for name, value in project["entry-points"][GROUP].items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
        paths.append(str(info.parent))
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}
