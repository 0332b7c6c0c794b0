"""The picture of a run: reward, payload and density over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from syncline.demo.config import BaseReport, StepReport
from syncline.demo.models import require

MB = 1e6
BLUE, GREEN, ORANGE, GREY = "#1f5fa8", "#2a7f4f", "#c25b12", "#666666"


def draw(
    base: BaseReport, steps: Sequence[StepReport], *, is_identical: bool, target: Path
) -> None:
    """Write a PNG with three panels over a common step axis; replaces a file of that name.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    # Figure and canvas by hand: pyplot would pick a window system and keep global state.
    figure = require("matplotlib.figure", "matplotlib").Figure(
        figsize=(8.0, 8.0), dpi=150, layout="constrained"
    )
    require("matplotlib.backends.backend_agg", "matplotlib").FigureCanvasAgg(figure)
    reward, payload, density = figure.subplots(3, 1, sharex=True)
    numbers = [step.step for step in steps]
    _curve(reward, numbers, [step.reward for step in steps], BLUE, "reward\n(share of sums right)")
    reward.set_ylim(0.0, 1.05)
    sizes = [step.payload_bytes / MB for step in steps]
    _curve(payload, numbers, sizes, GREEN, "payload of a version\n(MB)")
    payload.set_ylim(0.0, 1.25 * max(sizes))
    mean_bytes = sum(step.payload_bytes for step in steps) / len(steps)
    payload.set_title(
        f"a full copy is {base.full_bytes / MB:,.1f} MB: "
        f"{base.full_bytes / max(mean_bytes, 1.0):,.0f} times the mean payload",
        fontsize=9,
        color=GREY,
        loc="right",
    )
    shares = [100 * step.density for step in steps]
    _curve(density, numbers, shares, ORANGE, "weights that changed\n(% of BF16 elements)")
    density.set_ylim(0.0, 1.25 * max(*shares, 0.01))
    density.set_xlabel("optimiser step")
    density.xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels()
    verdict = "bit-identical" if is_identical else "NOT bit-identical"
    figure.suptitle(
        f"{base.model}, {base.parameters / 1e6:,.1f} M weights, RL on sums: "
        f"engine {verdict} after {len(steps)} syncs"
    )
    figure.savefig(target)


def _curve(axes: Any, steps: Sequence[int], values: Sequence[float], color: str, name: str) -> None:
    axes.plot(steps, values, color=color, marker="o", markersize=3.5, linewidth=1.6)
    axes.set_ylabel(name)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
