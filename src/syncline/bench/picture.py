"""The picture of `bench_transports`: seconds and peak memory over the size of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from syncline.bench.transports import TransportFigures
from syncline.errors import ConfigError

_COLORS = ("#1f5fa8", "#2a7f4f", "#c25b12", "#7a3b8f")
_MIB = 1 << 20


def draw_transports(figures: Sequence[TransportFigures], target: Path) -> None:
    """Write a PNG with two panels over the bucket size; broken lines are the bare loops.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        # Figure and canvas by hand: pyplot would pick a window system and keep global state.
        figure_class = import_module("matplotlib.figure").Figure
        canvas = import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed; run: pip install 'syncline[demo]'"
        ) from error
    figure = figure_class(figsize=(8.0, 7.0), dpi=150, layout="constrained")
    canvas(figure)
    times, peaks = figure.subplots(2, 1, sharex=True)
    names = list(dict.fromkeys(row.transport for row in figures))
    for name, color in zip(names, _COLORS, strict=False):
        rows = [row for row in figures if row.transport == name]
        sizes = [row.bucket_bytes / _MIB for row in rows]
        times.plot(sizes, [row.seconds for row in rows], "o-", color=color, label=name)
        times.plot(sizes, [row.bare_s for row in rows], "--", color=color, linewidth=1.0)
        peaks.plot(sizes, [row.peak_bytes / _MIB for row in rows], "o-", color=color, label=name)
    _dress(times, "seconds")
    _dress(peaks, "peak memory beside\nthe weights (MiB)")
    peaks.set_ylim(bottom=0.0)
    times.set_yscale("log")
    peaks.set_xscale("log", base=2)
    peaks.set_xlabel("bucket (MiB)")
    times.legend(frameon=False, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, 1.15))
    nbytes = figures[0].nbytes if figures else 0
    figure.suptitle(f"{nbytes / _MIB:,.0f} MiB to a second process; broken: a bare loop")
    figure.savefig(target)


def _dress(axes: Any, name: str) -> None:
    axes.set_ylabel(name)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
