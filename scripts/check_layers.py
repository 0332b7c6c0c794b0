"""Check that modules import only what their level may (the table in DEVELOP.md); exit 1 if one does not.

All imports count, also inside functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "syncline"
LEVELS = {
    "errors": 0,
    "types": 0,
    "version": 0,
    "abc": 1,
    "config": 1,
    "anonymous": 2,
    "arrays": 2,
    "device": 2,
    "durable": 2,
    "endpoints": 2,
    "kernels": 2,
    "threads": 2,
    "trace": 2,
    "format": 2,
    "layouts": 2,
    "sources": 3,
    "codecs": 3,
    "choice": 3,
    "stores": 3,
    "channels": 3,
    "peers": 3,
    "engines": 3,
    "commit": 3,
    "hotload": 3,
    "plan": 3,
    "interchange": 3,
    "scorers": 3,
    "gate": 3,
    "sync": 4,
    "bench": 5,
    "cli": 5,
    "hosts": 5,
    "serving": 5,
    "demo": 5,
    "sglang": 5,
    "vllm": 5,
    "": 5,
}
SIDEWAYS = {
    ("types", "errors"),
    ("format", "kernels"),
    ("layouts", "kernels"),
    ("device", "arrays"),
    ("device", "kernels"),
    ("version", "types"),
    ("abc", "config"),
    ("engines", "commit"),
    ("interchange", "codecs"),
    ("choice", "codecs"),
    ("scorers", "hotload"),
    ("gate", "scorers"),
    ("cli", "gate"),
    ("demo", "sglang"),
    ("demo", "vllm"),
    ("cli", "demo"),
    ("cli", "bench"),
    ("cli", "serving"),
    ("cli", "sglang"),
    ("cli", "vllm"),
}


def stage(module: str) -> str:
    """Return the first name below the package: `syncline.codecs.xor` -> `codecs`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported(path: Path) -> list[tuple[int, str]]:
    """Return line and module of every import of ours in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == "syncline":
                found += [(node.lineno, f"syncline.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
    return [(line, name) for line, name in found if name.split(".")[0] == "syncline"]


def main() -> int:
    """Print every import that breaks the table."""
    faults = []
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        own = relative.parts[0].removesuffix(".py")
        own = "" if own in ("__init__", "__main__") else own
        for line, module in imported(path):
            other = stage(module)
            if own in ("", other) or (own, other) in SIDEWAYS:
                continue
            if own not in LEVELS or other not in LEVELS:
                faults.append(f"{relative}:{line}: {own or other} has no level in check_layers.py")
            elif LEVELS[other] >= LEVELS[own]:
                faults.append(f"{relative}:{line}: {own} may not import {other}")
    print("\n".join(faults) if faults else "layers: all imports go downwards")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
