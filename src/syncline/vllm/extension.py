"""Methods for vLLM's workers, called by name: `--worker-extension-cls syncline.vllm.extension.SynclineWorker`.

They answer with plain values and never raise: a call that fails on several workers of vLLM 0.32 leaves
answers behind that later calls would take for theirs. The engine `syncline` brings them along by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from syncline.errors import ConfigError, SynclineError
from syncline.sources import CheckpointSource
from syncline.vllm import versions
from syncline.vllm.external import refuse_lasting
from syncline.vllm.kv import KvMemory
from syncline.vllm.placed import PlacedWeights
from syncline.vllm.ranks import GroupWorkers, OneWorker, Workers
from syncline.vllm.session import Session

_SESSION = "_syncline_session"
_log = logging.getLogger(__name__)


class SynclineWorker:
    """Mixed into a vLLM worker; every name begins with `syncline_`.

    All arguments are strings, and every answer has `error`: None, or how the call failed, in one sentence. The
    other members are those of `Session.status`; `stage_error` is what became of staging.
    """

    def syncline_open(self, store: str) -> dict[str, Any]:
        """Follow this store from now on."""
        return _answer(self, lambda session: session.open(store))

    def syncline_stage(self, version: str, repair: str = "") -> dict[str, Any]:
        """Begin to stage a version, by number; see `Session.stage`. `repair`: empty for no."""
        return _answer(self, lambda session: session.stage(int(version), repair=bool(repair)))

    def syncline_status(self) -> dict[str, Any]:
        """Say how this worker stands, and what became of staging."""
        return _answer(self, lambda _: None)

    def syncline_apply(self) -> dict[str, Any]:
        """Apply what is staged on all workers, or on none; see `Session.apply`."""
        return _answer(self, lambda session: session.apply())

    def syncline_undo(self) -> dict[str, Any]:
        """Take back what was applied and not finished; see `Session.undo`."""
        return _answer(self, lambda session: session.undo())

    def syncline_finish(self) -> dict[str, Any]:
        """Make what was applied the version that is held; see `Session.finish`."""
        return _answer(self, lambda session: session.finish())


def _answer(worker: Any, do: Callable[[Session], object]) -> dict[str, Any]:
    error: str | None = None
    status: dict[str, Any] = {}
    try:
        session = session_of(worker)
        try:
            do(session)
        finally:
            status = session.status()
    except Exception as failure:  # noqa: BLE001 - whatever it is, it is answered and logged
        is_ours = isinstance(failure, SynclineError)
        _log.error("syncline: %s", failure, exc_info=None if is_ours else failure)
        error = f"{type(failure).__name__}: {failure}"
    return {**status, "error": error}


def session_of(worker: Any) -> Session:
    """Return the session of a vLLM worker; one is made if there is none yet.

    Raises:
        TransportUnavailableError: this vLLM is not one that is known to work.
        ConfigError: the model was not started from a directory, or a cache outside of vLLM would outlive a commit.
    """
    session = getattr(getattr(worker, "weight_transfer_engine", None), "session", None)
    if not isinstance(session, Session):
        session = worker.__dict__.get(_SESSION)
    if session is None:
        session = new_session(worker.model_runner.get_model(), worker.vllm_config)
        worker.__dict__[_SESSION] = session
    return session


def new_session(model: Any, vllm_config: Any) -> Session:
    """Return a session over the model of this worker process; see `session_of`."""
    versions.check_installed()
    refuse_lasting(vllm_config)
    _log_as_vllm_does()
    workers = _workers()
    config = vllm_config.model_config

    def base() -> CheckpointSource:
        path = Path(str(config.model))
        if not path.is_dir():
            raise ConfigError(
                f"model {str(config.model)!r}: expected a directory with the checkpoint that the run began with, so "
                "that deltas can be decoded against it; download it and give vLLM the directory"
            )
        return CheckpointSource(path)

    kv = KvMemory(vllm_config.compilation_config.static_forward_context)
    return Session(PlacedWeights(model, base(), workers), workers, base, kv=kv)


def _log_as_vllm_does() -> None:
    """Let what Syncline says in a worker appear in vLLM's log, unless somebody has set up its logger."""
    ours, theirs = logging.getLogger("syncline"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def _workers() -> Workers:
    from vllm.distributed.parallel_state import get_world_group  # noqa: PLC0415

    group = get_world_group()
    return OneWorker() if group.world_size == 1 else GroupWorkers(group.cpu_group)
