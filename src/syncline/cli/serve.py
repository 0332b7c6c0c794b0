"""`serve`: the hot-load API in front of a checkpoint directory, or of an engine of your own."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import click

from syncline.abc import Engine
from syncline.cli import output
from syncline.cli.options import json_option
from syncline.engines import CheckpointDir
from syncline.engines.checkpoint_dir import Mode
from syncline.errors import ConfigError
from syncline.hotload import Token
from syncline.serving import Replica
from syncline.serving import serve as run_server
from syncline.stores import open_store
from syncline.vllm.commit import MODES, CommitOptions
from syncline.vllm.control import HttpControl, PauseMode
from syncline.vllm.server import VllmServer

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
@click.option("--engine", "kind", type=click.Choice(["vllm"]), help="Follow with a running server.")
@click.option("--url", metavar="URL", help="With --engine: where that server listens.")
@click.option(
    "--pause",
    type=click.Choice(MODES),
    default="keep",
    show_default=True,
    help="With --engine: what becomes of running requests.",
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
    kind: str | None,
    url: str | None,
    pause: PauseMode,
    as_json: bool,
) -> None:
    """Keep DIR, a checkpoint directory, on the versions that clients of the hot-load API ask for.

    With --engine vllm --url http://...: keep a running vLLM server on them, and on whatever becomes current.

    ENGINE is `module:name` of a `syncline.abc.Engine`, or of a function without arguments that makes one;
    the module is looked for in the current directory too.
    """
    token = None if token_env is None else Token.from_env(token_env)
    if kind is not None:
        replica = _vllm(target, url, store, pause, poll_s)
        served = url
    elif target is None or url is not None:
        raise click.UsageError("give DIR or ENGINE, or --engine with --url")
    else:
        engine = _engine(target) if _OBJECT.fullmatch(target) else _directory(target, mode, adopt)
        replica = Replica(open_store(store), engine, follow_s=poll_s if follow else None)
        served = target

    def ready(url: str) -> None:
        if as_json:
            output.show_json({"url": url, "target": served})
        else:
            output.show_line(f"serving {served} on {url}")

    run_server(replica, host=host, port=port, token=token, ready=ready)


def _vllm(
    target: str | None, url: str | None, store: str, pause: PauseMode, poll_s: float
) -> Replica:
    """Return a replica whose engine is a running vLLM; it always follows."""
    if url is None or target is not None:
        raise click.UsageError("--engine needs --url, and neither DIR nor ENGINE")
    opened = open_store(store)
    server = VllmServer(HttpControl(url), opened, _for_workers(store), CommitOptions(pause))
    # The commit resets the caches itself, so that there is nothing left to do when a client asks for it.
    return Replica(opened, server, follow_s=poll_s, reset_cache=lambda _: None)


def _for_workers(store: str) -> str:
    """Return a store as vLLM's workers see it, who may run in another directory."""
    return store if "://" in store else str(Path(store).absolute())


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
