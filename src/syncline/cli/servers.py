"""The engines of `serve --engine`: servers of other projects that a replica keeps on a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

import click

from syncline.abc import Store
from syncline.engines import CheckpointDir
from syncline.gate import Gate, GateAction, read_limits
from syncline.hotload import Token
from syncline.scorers import SglangScorer, VllmScorer
from syncline.serving import Puller, Replica, ScoredPuller
from syncline.sglang.commit import CommitOptions as SglangOptions
from syncline.sglang.control import PauseMode as SglangPause
from syncline.sglang.control import SglangHttp
from syncline.sglang.server import SglangServer
from syncline.stores import open_store
from syncline.vllm.commit import CommitOptions as VllmOptions
from syncline.vllm.control import HttpControl
from syncline.vllm.control import PauseMode as VllmPause
from syncline.vllm.server import VllmServer

Mode = TypeVar("Mode")

KINDS = ("vllm", "sglang")
_VLLM_PAUSES: dict[str, VllmPause] = {mode: mode for mode in get_args(VllmPause)}
_SGLANG_PAUSES: dict[str, SglangPause] = {mode: mode for mode in get_args(SglangPause)}
PAUSES = tuple(dict.fromkeys((*_VLLM_PAUSES, *_SGLANG_PAUSES)))


@dataclass(frozen=True, slots=True)
class Gating:
    """How versions are scored after they were taken; see `syncline.gate.Gate`.

    Attributes:
        limits: file that they are read from, and written to when they are learned; None: neither.
    """

    action: GateAction
    every: int
    limits: Path | None


@dataclass(frozen=True, slots=True)
class Following:
    """What the command line says of a server.

    Attributes:
        store: where versions come from.
        url: of the server.
        target: its checkpoint directory; None where it needs none.
        staging: where its ranks find orders; None: beside the checkpoint.
        pause: what becomes of running requests; None: the engine's own way of keeping them.
        poll_s: how often to look for a new version.
        token: that the server asks for; None: none.
        gating: whether and how every version is scored.
        repair: begin with a full version, and believe nothing that the server says it holds.
    """

    store: str
    url: str
    target: str | None
    staging: str | None
    pause: str | None
    poll_s: float
    token: Token | None = None
    gating: Gating | None = None
    repair: bool = False


def replica_of(kind: str, given: Following) -> Replica:
    """Return a replica whose engine is a running server; it always follows.

    Raises:
        click.UsageError: options that do not go together.
    """
    opened = open_store(given.store)
    engine: Puller = _vllm(given) if kind == "vllm" else _sglang(given)
    if given.gating is not None:
        engine = _scored(kind, given, engine, opened, given.gating)
    # The commit resets the caches itself, so that there is nothing left to do when a client asks for it.
    return Replica(
        opened,
        engine,
        follow_s=given.poll_s,
        reset_cache=lambda _: None,
        repair=given.repair,
    )


def _scored(
    kind: str, given: Following, engine: Puller, store: Store, gating: Gating
) -> ScoredPuller:
    scorer = (VllmScorer if kind == "vllm" else SglangScorer)(given.url, token=given.token)
    limits = None if gating.limits is None else read_limits(gating.limits)
    gate = Gate(scorer, store, limits=limits, every=gating.every, action=gating.action)
    return ScoredPuller(engine, store, gate, gating.limits)


def _vllm(given: Following) -> VllmServer:
    if given.target is not None or given.staging is not None:
        raise click.UsageError("--engine vllm needs --url, and neither DIR, ENGINE nor --staging")
    mode = _mode(_VLLM_PAUSES, "keep" if given.pause is None else given.pause)
    # The workers may run in another directory.
    store = given.store if "://" in given.store else str(Path(given.store).absolute())
    return VllmServer(
        HttpControl(given.url, given.token), open_store(given.store), store, VllmOptions(mode)
    )


def _sglang(given: Following) -> SglangServer:
    if given.target is None:
        raise click.UsageError(
            "--engine sglang needs DIR, the checkpoint that the server was started from"
        )
    target = Path(given.target)
    staging = target.with_name(target.name + ".staging")
    return SglangServer(
        SglangHttp(given.url, given.token),
        open_store(given.store),
        CheckpointDir(target),
        staging if given.staging is None else Path(given.staging),
        options=SglangOptions(None if given.pause is None else _mode(_SGLANG_PAUSES, given.pause)),
    )


def _mode(known: Mapping[str, Mode], name: str) -> Mode:
    if name not in known:
        raise click.UsageError(f"--pause: expected one of {', '.join(known)}, found {name}")
    return known[name]
