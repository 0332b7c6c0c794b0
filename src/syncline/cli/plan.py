"""`plan`: what would move between a trainer and engines, from a config and two meshes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import lcm
from pathlib import Path
from typing import Any

import click

from syncline.cli import output
from syncline.cli.options import json_option
from syncline.errors import ConfigError
from syncline.layouts import EngineMesh, Layout, MegatronMesh, engine_layout, megatron_layout
from syncline.layouts.engines import EngineName
from syncline.plan import heat_map, legend, load_of, make_plan, read_sizes, record, records, summary
from syncline.stores import open_store
from syncline.sync.history import History

# 0: not given.
_TRAINER = {
    "world": 0,
    "tp": 1,
    "pp": 1,
    "ep": 1,
    "etp": 0,
    "cp": 1,
    "vpp": 1,
    "first": 0,
    "last": 0,
    "embedding": 0,
    "loss": 0,
}
_ENGINE = {"tp": 1, "ep": 1, "replicas": 1, "redundant": 0}


@click.command()
@click.option(
    "--model",
    required=True,
    metavar="CONFIG.json",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The checkpoint's config.",
)
@click.option("--trainer", default="", metavar="SIZES", help=f"Megatron: {', '.join(_TRAINER)}.")
@click.option(
    "--stages",
    metavar="LAYERS",
    help="Layers of every pipeline stage: 14,16,16,15; with virtual stages 7+7,8+8,8+8,8+7.",
)
@click.option("--engine", default="", metavar="SIZES", help=f"Engines: {', '.join(_ENGINE)}.")
@click.option(
    "--names",
    type=click.Choice(["vllm", "sglang"]),
    default="vllm",
    show_default=True,
    help="Whose names the engine's tensors have in records.",
)
@click.option(
    "--bucket-mb",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="What a rank may stage at a time.",
)
@click.option("--tensor", metavar="NAME", help="Print the record of this tensor as JSON.")
@click.option("--store", help="Where records take version and fingerprint from.")
@click.option("--records", "all_records", is_flag=True, help="Print all records as JSON lines.")
@json_option
def plan(
    model: Path,
    trainer: str,
    stages: str | None,
    engine: str,
    names: EngineName,
    bucket_mb: int,
    tensor: str | None,
    store: str | None,
    all_records: bool,
    as_json: bool,
) -> None:
    """Plan how weights go from a Megatron trainer to engines; reads the config and nothing else."""
    config = _read_config(model)
    sizes = read_sizes(engine, _ENGINE)
    mesh = _trainer_mesh(trainer, stages)
    source = megatron_layout(config, mesh)
    engine_mesh = EngineMesh(sizes["tp"], ep=sizes["ep"], redundant=sizes["redundant"])
    target = engine_layout(config, engine_mesh, engine=names)
    if tensor is None and not all_records:
        limit_bytes = bucket_mb * 1_000_000
        warnings = _not_planned(config)
        _show_plan(source, target, sizes["replicas"], limit_bytes, warnings, as_json=as_json)
        return
    more: dict[str, Any] = {
        "engines": sizes["replicas"],
        "stage": lambda rank: asdict(mesh.coordinates(rank)),
        "state": None if store is None else _state(store),
    }
    if tensor is not None:
        output.show_json(record(tensor, source, target, **more))
    else:
        for entry in records(source, target, **more):
            output.show_json(entry)


def _state(store: str) -> Callable[[str], dict[str, Any]]:
    """Return what the current version of a store says of a tensor."""
    at = History.open(open_store(store)).target(None)
    marks = {entry.meta.name: entry.fingerprint.hex() for entry in at.manifest.tensors}
    return lambda name: {"version": at.version, "fingerprint": marks.get(name)}


def _not_planned(config: Mapping[str, Any]) -> list[str]:
    """Return what the config has and no table plans."""
    found = []
    if "quantization_config" in config:
        found.append(
            "the engine's quantised tensors are not planned; sizes are those of config dtype"
        )
    if "vision_config" in config:
        found.append("what sees (the vision part) is not planned, only the text model")
    return found


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: expected a config in JSON, found {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def _trainer_mesh(text: str, stages: str | None) -> MegatronMesh:
    """Return the mesh that sizes describe, of as few ranks as they allow where `world` is not given."""
    sizes = read_sizes(text, _TRAINER)
    etp = sizes["etp"] or sizes["tp"]
    fewest = sizes["pp"] * lcm(sizes["tp"] * sizes["cp"], etp * sizes["ep"])
    return MegatronMesh(
        sizes["world"] or fewest,
        tp=sizes["tp"],
        pp=sizes["pp"],
        ep=sizes["ep"],
        etp=etp,
        cp=sizes["cp"],
        vpp=sizes["vpp"],
        first_layers=sizes["first"] or None,
        last_layers=sizes["last"] or None,
        counts_embedding=bool(sizes["embedding"]),
        counts_loss=bool(sizes["loss"]),
        stages=None if stages is None else MegatronMesh.stages_of(_layer_counts(stages)),
    )


def _layer_counts(text: str) -> list[list[int]]:
    """Return the layers of every chunk of every stage, out of `7+7,8+8`."""
    words = [stage.split("+") for stage in text.split(",")]
    if not all(word.isdigit() for stage in words for word in stage):
        raise ConfigError(
            f"--stages: expected layers of every stage such as 7,8,8,7 or 4+3,4+4, found {text!r}"
        )
    return [[int(word) for word in stage] for stage in words]


def _show_plan(
    source: Layout,
    target: Layout,
    engines: int,
    limit_bytes: int,
    warnings: list[str],
    *,
    as_json: bool,
) -> None:
    unused = [name for name in source.catalog if name not in target.catalog]
    made = make_plan(source, target, engines=engines, limit_bytes=limit_bytes, unused=unused)
    load = load_of(made)
    figures = summary(made, load, source, target)
    if unused:
        count = f"{len(unused)} tensors of the trainer go to no engine, first {unused[0]}"
        warnings = [count, *warnings]
    if as_json:
        more = {"unused": unused, "warnings": warnings, "links_bytes": load.links.tolist()}
        output.show_json({**figures, **more})
        return
    size, tightest = output.size, figures["tightest"]
    rows = [
        ("tensors, bytes", f"{figures['tensors']:,}, {size(figures['model_bytes'])}"),
        ("engines, buckets", f"{engines:,}, {figures['buckets']:,}"),
        ("moved, of that repeated", _pair(figures["moved_bytes"], figures["repeated_bytes"])),
        *(
            (f"{what} by a rank: least, mean, most", ", ".join(size(n) for n in spread.values()))
            for what, spread in (
                ("sent", figures["sent_bytes"]),
                ("received", figures["received_bytes"]),
            )
        ),
        ("links, the busiest", f"{figures['links']:,}, {size(figures['link_bytes_max'])}"),
        ("staged at most by a rank", size(figures["staged_bytes"])),
        (
            "memory of a rank at its peak: source, target",
            ", ".join(size(n) for n in figures["peak_bytes"].values()),
        ),
        (
            "tightest rank, its memory",
            f"{tightest['side']} {tightest['rank']}, {size(tightest['bytes'])}",
        ),
        ("digest", figures["digest"]),
    ]
    output.show_table("plan", ("", "figure"), rows)
    for warning in warnings:
        output.show_line(f"warning: {warning}")
    output.show_line("bytes from trainer ranks (down) to engine ranks (across):")
    output.show_line(heat_map(load))
    output.show_line(legend(load, output.size))


def _pair(whole: int, of_that: int) -> str:
    return f"{output.size(whole)}, {output.size(of_that)}"


COMMANDS = (plan,)
