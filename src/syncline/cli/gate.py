"""`gate`: does a running engine compute what the trainer computes?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import click

from syncline.abc import Scorer, Store
from syncline.cli import output
from syncline.cli.options import json_option, store_argument
from syncline.errors import ConfigError, EndpointError, VerifyError
from syncline.gate import (
    Committed,
    Gate,
    GateReport,
    Reference,
    draw_probes,
    make_reference,
    read_limits,
)
from syncline.gate.limits import FIGURES, MARGINS
from syncline.gate.probes import LENGTHS
from syncline.hotload import Token
from syncline.scorers import SglangScorer, TorchScorer, VllmScorer
from syncline.stores import open_store
from syncline.sync.layout import own_history
from syncline.sync.verify import verify_directory
from syncline.version import HeldVersion
from syncline.vllm.control import HttpControl

FLAGGED = 3
UNJUDGED = 4
_STATUS_TIMEOUT_S = 30.0

Kind = Literal["vllm", "sglang"]


@click.command()
@store_argument
@click.argument("url")
@click.option(
    "--engine",
    "kind",
    type=click.Choice(["vllm", "sglang"]),
    default="vllm",
    show_default=True,
    help="What listens at URL.",
)
@click.option("--version", type=click.IntRange(min=1), help="Default: the current version.")
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Score this directory, which must hold the version, in place of the trainer's scores.",
)
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(min=1),
    multiple=True,
    help="With --checkpoint: length of a prompt; may be repeated. Default: "
    + ", ".join(map(str, LENGTHS)),
)
@click.option(
    "--limits",
    "limits_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Limits from an earlier version; written if the file is not there and the version gives some.",
)
@click.option(
    "--proven",
    is_flag=True,
    help="You know that the engine holds these very weights, as when it was just started from them.",
)
@click.option("--wait-s", type=click.FloatRange(0), default=10.0, show_default=True)
@click.option("--token-env", metavar="NAME", help="Environment variable with the engine's API key.")
@json_option
def gate(
    store: str,
    url: str,
    kind: Kind,
    version: int | None,
    checkpoint: Path | None,
    lengths: tuple[int, ...],
    limits_path: Path | None,
    proven: bool,
    wait_s: float,
    token_env: str | None,
    as_json: bool,
) -> None:
    """Score fixed texts on the engine at URL and compare with the trainer's scores of a version in STORE.

    Exit status 0: within the limits, or the limits were learned; 3: above them; 4: not judged, because there
    are no limits yet or no scores; 1: an error.
    """
    token = None if token_env is None else Token.from_env(token_env)
    opened = open_store(store)
    target = own_history(opened).target(version)
    limits = None if limits_path is None else read_limits(limits_path)
    reference = None if checkpoint is None else _reference(opened, target, checkpoint, lengths)
    scorer: Scorer = (VllmScorer if kind == "vllm" else SglangScorer)(url, token=token)
    is_proven = proven or (kind == "vllm" and _is_proven(url, token, target))
    report = Gate(scorer, opened, limits=limits, wait_s=wait_s).check(
        Committed(target.version, target.sha256, is_proven), reference=reference
    )
    if limits_path is not None and limits is None and report.limits is not None:
        limits_path.write_bytes(report.limits.dump())
    _show(report, as_json=as_json)
    if not report.is_good:
        sys.exit(FLAGGED if report.verdict == "flagged" else UNJUDGED)


def _reference(
    store: Store, target: HeldVersion, checkpoint: Path, lengths: tuple[int, ...]
) -> Reference:
    """Return the scores of a checkpoint that holds the version, by transformers."""
    with output.progress("verifying", is_quiet=True) as observe:
        _, mismatches = verify_directory(store, checkpoint, target.version, observe)
    if mismatches:
        raise VerifyError(
            f"{checkpoint}: expected exactly version {target.version}, found {len(mismatches)} differences, the "
            f"first in {mismatches[0].name} ({mismatches[0].detail}); syncline pull makes it",
            version=target.version,
        )
    try:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            f"--checkpoint needs transformers and torch ({error}); run: pip install 'syncline[demo]'"
        ) from error
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(checkpoint), dtype="auto", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{checkpoint}: transformers cannot load it: {error}") from error
    scorer = TorchScorer(model)
    vocabulary = scorer.vocabulary
    probes = draw_probes(vocabulary, scorer=scorer, lengths=lengths or LENGTHS)
    return make_reference(target.version, target.sha256, scorer, probes)


def _is_proven(url: str, token: Token | None, target: HeldVersion) -> bool:
    """Tell whether every worker says that it holds this version, as Syncline proved when it put it there."""
    try:
        statuses = HttpControl(url, token).call("syncline_status", timeout_s=_STATUS_TIMEOUT_S)
    except EndpointError:
        return False  # a vLLM without Syncline, or without its development routes
    return bool(statuses) and all(status.get("sha256") == target.sha256 for status in statuses)


def _show(report: GateReport, *, as_json: bool) -> None:
    if as_json:
        output.show_json(report.as_dict())
        return
    if report.deviation is not None:
        found, limits = report.deviation.as_dict(), report.limits
        held = {} if limits is None else limits.as_dict()
        output.show_table(
            f"{report.engine} against {report.trainer}, {report.deviation.positions} tokens, in nats",
            ("figure", "found", "limit", "margin learned with"),
            [
                (
                    name.replace("_", " "),
                    "" if found[name] is None else f"{found[name]:.3g}",
                    "" if not held else f"{held[against]:.3g}",
                    f"{MARGINS[against]:g}",
                )
                for name, against in FIGURES
            ],
        )
    output.show_line(str(report))


COMMANDS = (gate,)
