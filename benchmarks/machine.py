"""What figures were measured on; goes into every JSON result."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "torch", "transformers", "zstandard")


def machine(*more_packages: str) -> dict[str, Any]:
    """Return commit, whether files differ from it, date, processor and versions."""
    here = Path(__file__).parent
    model = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "commit": _git(here, "rev-parse", "--short", "HEAD"),
        "is_modified": bool(_git(here, "status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": model[0] if model else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {
            **{name: metadata.version(name) for name in PACKAGES if find_spec(name)},
            **{name: metadata.version(name) for name in more_packages},
        },
    }


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True, cwd=directory
    )
    return done.stdout.strip()
