"""`serve`: the hot-load API in front of a checkpoint directory, or of an engine of your own."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from syncline.abc import Engine
from syncline.cli import output
from syncline.cli.options import json_option
from syncline.cli.servers import KINDS, PAUSES, Following, Gating, replica_of
from syncline.engines import CheckpointDir
from syncline.engines.checkpoint_dir import Mode
from syncline.errors import ConfigError
from syncline.gate import GateAction
from syncline.hotload import Token
from syncline.serving import Replica
from syncline.serving import serve as run_server
from syncline.stores import open_store

_OBJECT = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


@click.command()
@click.argument("target", metavar="[DIR|ENGINE]", required=False)
@click.option("--store", required=True, metavar="STORE", help="Where versions come from.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: a free one."
)
@click.option(
    "--token-env",
    metavar="NAME",
    help="Environment variable with the bearer token; needed unless the address is a loopback one.",
)
@click.option("--follow", is_flag=True, help="Load new versions without being told, too.")
@click.option(
    "--poll-s",
    type=click.FloatRange(0.1),
    default=2.0,
    show_default=True,
    help="With --follow: how often to look, in seconds.",
)
@click.option(
    "--mode",
    type=click.Choice(["in_place", "swap"]),
    default="in_place",
    show_default=True,
    help="With DIR: change the files, or build the next directory beside it and flip a link.",
)
@click.option("--adopt", is_flag=True, help="With DIR: take over a checkpoint of somebody else's.")
@click.option(
    "--repair",
    is_flag=True,
    help="Begin with a full version, and rewrite whatever differs from it.",
)
@click.option("--engine", "kind", type=click.Choice(KINDS), help="Follow with a running server.")
@click.option("--url", metavar="URL", help="With --engine: where that server listens.")
@click.option(
    "--pause",
    type=click.Choice(PAUSES),
    help="With --engine: what becomes of running requests; by default they go on with the new weights.",
)
@click.option(
    "--engine-token-env",
    metavar="NAME",
    help="With --engine: environment variable with the token that the server asks for.",
)
@click.option(
    "--staging",
    metavar="DIR",
    help="With --engine sglang: its SYNCLINE_SGLANG_STAGING; by default beside the checkpoint.",
)
@click.option(
    "--gate",
    "gate_action",
    type=click.Choice(["flag", "rollback"]),
    help="With --engine: score every version against the trainer's scores; what to do above the limits.",
)
@click.option(
    "--gate-every",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --gate: score one version in so many.",
)
@click.option(
    "--gate-limits",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --gate: limits from an earlier run; written when they are learned.",
)
@json_option
def serve(
    target: str | None,
    store: str,
    host: str,
    port: int,
    token_env: str | None,
    follow: bool,
    poll_s: float,
    mode: Mode,
    adopt: bool,
    repair: bool,
    kind: str | None,
    url: str | None,
    pause: str | None,
    engine_token_env: str | None,
    staging: str | None,
    gate_action: GateAction | None,
    gate_every: int,
    gate_limits: Path | None,
    as_json: bool,
) -> None:
    """Keep DIR, a checkpoint directory, on the versions that clients of the hot-load API ask for.

    With --engine vllm --url http://...: keep a running vLLM server on them, and on whatever becomes current.
    With DIR --engine sglang --url http://...: the same with a running SGLang server that was started from DIR.

    ENGINE is `module:name` of a `syncline.abc.Engine`, or of a function without arguments that makes one;
    the module is looked for in the current directory too.
    """
    token = None if token_env is None else Token.from_env(token_env)
    if gate_action is None:
        _refuse("--gate", "gate_every", "gate_limits")
    if kind is not None:
        if url is None:
            raise click.UsageError("--engine needs --url")
        _refuse("DIR without --engine", "mode", "adopt")
        secret = None if engine_token_env is None else Token.from_env(engine_token_env)
        gating = None if gate_action is None else Gating(gate_action, gate_every, gate_limits)
        given = Following(store, url, target, staging, pause, poll_s, secret, gating, repair)
        replica = replica_of(kind, given)
        served = url
    elif target is None or url is not None or gate_action is not None:
        raise click.UsageError("give DIR or ENGINE, or --engine with --url")
    else:
        _refuse("--engine", "pause", "engine_token_env", "staging")
        if _OBJECT.fullmatch(target):
            _refuse("DIR", "mode", "adopt")
        engine = _engine(target) if _OBJECT.fullmatch(target) else _directory(target, mode, adopt)
        follow_s = poll_s if follow else None
        replica = Replica(open_store(store), engine, follow_s=follow_s, repair=repair)
        served = target

    def ready(url: str) -> None:
        if as_json:
            output.show_json({"url": url, "target": served})
        else:
            output.show_line(f"serving {served} on {url}")

    _log_to_stderr()
    run_server(replica, host=host, port=port, token=token, ready=ready)


def _refuse(needed: str, *names: str) -> None:
    """Refuse options that would do nothing, by the names of their parameters."""
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} needs {needed}")


def _log_to_stderr() -> None:
    """Say which versions are loaded and what goes wrong: of Syncline alone, not of every request."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("syncline")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def _directory(path: str, mode: Mode, adopt: bool) -> CheckpointDir:
    return CheckpointDir(Path(path), mode=mode, adopt=adopt)


def _engine(target: str) -> Engine:
    """Import the engine that the person at the command line names."""
    module_name, name = target.split(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{target}: {error}; expected module:name of an engine") from error
    made = found() if callable(found) and not isinstance(found, Engine) else found
    if not isinstance(made, Engine):
        raise ConfigError(f"{target}: expected a syncline.abc.Engine, found {type(made).__name__}")
    return made


COMMANDS = (serve,)
