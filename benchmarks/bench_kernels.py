"""How fast is each kernel, on one thread, against reading the same memory and against plain torch operations?

64 Mi BF16 elements (128 MiB a side, more than the caches hold) in windows of 4 Mi, random places changed by one ulp;
with every instruction set that this processor has. Prints a table, or JSON with --json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from syncline.bench import KernelFigures, bench_kernels
from syncline.kernels import native

PACKAGES = ("numpy", "torch")


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    model = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "commit": commit.stdout.strip(),
        "cpu": model[0] if model else platform.machine(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES if find_spec(name)},
    }


def row(figures: KernelFigures) -> str:
    """Return one line of the table."""
    times = "" if figures.times_torch is None else f"{figures.times_torch:.1f}x"
    return (
        f"{figures.name:28}{1e3 * figures.seconds:10.2f}{1e3 * figures.spread_s:10.2f}"
        f"{figures.bytes_per_s / 1e9:10.1f}{figures.of_roof:10.0%}{times:>10}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--density", type=float, default=0.01, help="share of changed elements")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, Any] = {**machine(), "density": arguments.density, "isas": {}}
    if not arguments.json:
        print(f"{results['cpu']}, {arguments.density:.2%} changed, one thread")
    for isa in native.available_isas():
        native.choose_isa(isa)
        roof, rows = bench_kernels(arguments.density)
        results["isas"][isa] = {
            "read_bytes_per_s": roof,
            "kernels": [asdict(figures) | {"of_roof": figures.of_roof} for figures in rows],
        }
        if not arguments.json:
            print(f"\n{isa}; reads two streams at {roof / 1e9:.1f} GB/s at best")
            print(f"{'':28}{'ms':>10}{'spread':>10}{'GB/s':>10}{'of read':>10}{'vs torch':>10}")
            print("\n".join(map(row, rows)))
    if arguments.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
