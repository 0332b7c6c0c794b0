"""`explain`: which way versions would go to the engines, what the others would take, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from syncline import config
from syncline.abc import ignore
from syncline.channels.lobby import Lobby, join
from syncline.choice import (
    REFERENCE,
    Decision,
    Density,
    Link,
    Links,
    Option,
    Topology,
    Updater,
    answer_probe,
    measure_machine,
    probe_channel,
)
from syncline.cli import output
from syncline.cli.options import json_option
from syncline.sources import CheckpointSource
from syncline.stores import open_store
from syncline.sync.choosing import assumed_density, choose, pair_density, store_density
from syncline.sync.compare import Comparison, compare
from syncline.version import Kind

_PROBE = "probe"
_WAIT_S = 60.0
_TERMS = ("encode", "wire", "decode", "apply", "pause")

_POSITIVE = click.IntRange(min=1)
_SPEED = click.FloatRange(0, min_open=True)


@click.command()
@click.argument("store", metavar="[STORE]", required=False)
@click.option("--engines", type=_POSITIVE, default=1, show_default=True)
@click.option(
    "--hosts", type=_POSITIVE, default=1, show_default=True, help="Machines with engines."
)
@click.option(
    "--writers", type=_POSITIVE, default=1, show_default=True, help="Trainer ranks that publish."
)
@click.option("--colocated", is_flag=True, help="All engines are on the trainer's machine.")
@click.option("--fabric", is_flag=True, help="Trainer and engines reach each other directly.")
@click.option("--no-store", is_flag=True, help="There is no store.")
@click.option("--joining", type=int, default=0, help="Engines that join a running fleet.")
@click.option("--holders", type=int, default=0, help="Who offers them the version from memory.")
@click.option(
    "--pair",
    nargs=2,
    type=click.Path(exists=True, path_type=Path),
    metavar="OLD NEW",
    help="Checkpoints to measure the density of.",
)
@click.option("--density", type=click.FloatRange(0, 1), help="Share of the units that changes.")
@click.option("--model-gb", type=_SPEED, help="Weights, raw.")
@click.option("--store-mb-s", type=_SPEED, help="Speed of the store; default: a probe of it.")
@click.option("--fabric-mb-s", type=_SPEED, help="Speed of the fabric.")
@click.option(
    "--probe", metavar="HOST:PORT", help="Measure the fabric with who answers there; see --answer."
)
@click.option(
    "--answer", metavar="HOST:PORT", help="Do nothing but answer one --probe from another machine."
)
@click.option("--measure", is_flag=True, help="Measure this machine instead of recorded figures.")
@click.option("--pause-s", type=click.FloatRange(0), default=0.0, help="What engines take to stop.")
@click.option("--transport", type=click.Choice(get_args(Updater)), help="Only this one.")
@click.option("--kind", type=click.Choice(["full", "delta"]), help="Only versions of this kind.")
@json_option
def explain(
    store: str | None,
    probe: str | None,
    answer: str | None,
    transport: Updater | None,
    kind: Kind | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Say how versions would best go to the engines, what each other way would take, and why."""
    if answer is not None:
        _answer(answer)
        return
    opened = None if store is None else open_store(store)
    names = ("engines", "hosts", "writers", "colocated", "fabric", "joining", "holders")
    topology = Topology(**{name: options[name] for name in names}, store=not options["no_store"])
    density = assumed_density() if opened is None else store_density(opened)
    decision = choose(
        topology,
        opened,
        density=_density(density, options),
        links=_links(probe, options),
        machine=measure_machine(options["pause_s"])
        if options["measure"]
        else replace(REFERENCE, pause_s=options["pause_s"]),
        transport=transport,
        kind=kind,
    )
    if as_json:
        output.show_json(decision.as_dict())
    else:
        _show(decision)


def _density(found: Density, options: dict[str, Any]) -> Density:
    """Return what is known of the model: two checkpoints, or the run's versions; what is given counts."""
    if options["pair"]:
        found = pair_density(_compared(*options["pair"]))
    given: dict[str, Any] = {}
    if options["model_gb"] is not None:
        given["model_bytes"] = round(1e9 * options["model_gb"])
    if options["density"] is not None:
        given |= {"share": options["density"], "origin": "given"}
    return replace(found, **given)


def _compared(old: Path, new: Path) -> Comparison:
    return compare(CheckpointSource(old), CheckpointSource(new), ignore)


def _links(probe: str | None, options: dict[str, Any]) -> Links:
    """Return the links that are given, or measured over a connection."""
    links = Links()
    if options["fabric_mb_s"] is not None:
        links = replace(links, fabric=Link.of(1e6 * options["fabric_mb_s"]))
    if probe is not None:
        links = replace(links, fabric=_probed(probe))
    if options["store_mb_s"] is not None:
        links = replace(links, store=Link.of(1e6 * options["store_mb_s"]))
    return links


def _probed(address: str) -> Link:
    channel = join(address, _PROBE, "explain", _WAIT_S, config.live_token_variable())
    try:
        return probe_channel(channel)
    finally:
        channel.close()


def _answer(address: str) -> None:
    """Wait for one probe and answer it."""
    lobby = Lobby(address, _PROBE, _WAIT_S, config.live_token_variable())
    try:
        output.show_line(f"answering one probe at {lobby.address}")
        lobby.wait(1, _WAIT_S)
        for channel in lobby.members().values():
            answer_probe(channel, timeout_s=_WAIT_S)
    finally:
        lobby.close()


def _show(decision: Decision) -> None:
    options = (decision.chosen, *decision.alternatives)
    rows = [
        _row(option, is_chosen=option is decision.chosen)
        for option in options
        if option.terms is not None
    ]
    size = output.size(decision.density.model_bytes)
    output.show_table(
        f"{size} of weights, {decision.density.share:.3%} changed; predicted seconds",
        ("way", "kind", "encoding", "to an engine", *_TERMS, "total"),
        rows,
    )
    for line in decision.why:
        output.show_line(f"- {line}")
    for line in _refusals(options):
        output.show_line(line)


def _row(option: Option, *, is_chosen: bool) -> tuple[str, ...]:
    terms = [getattr(option.terms, f"{name}_s") for name in _TERMS]
    return (
        f"{'* ' if is_chosen else '  '}{option.updater}",
        option.kind,
        "" if option.encoding is None else option.encoding,
        output.size(option.wire_bytes),
        *(f"{seconds:.3f}" for seconds in terms),
        f"{option.predicted_s:.3f}",
    )


def _refusals(options: Iterable[Option]) -> list[str]:
    return [f"no {option}: {option.why}" for option in options if option.terms is None]


COMMANDS = (explain,)
