"""One worker's part in following a store: stage beside generation, apply and undo together with the others.

Every act that changes something is collective: each worker does its part, all hear how it went everywhere,
and if it failed anywhere every worker puts its old bits back.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from syncline.abc import Store, WeightSource
from syncline.errors import (
    CommitError,
    ConfigError,
    SynclineError,
    TornUpdateError,
    VerifyError,
)
from syncline.stores import open_store
from syncline.types import ZERO, Fingerprint
from syncline.version import HeldVersion
from syncline.vllm import moving
from syncline.vllm.copy import HostCopy
from syncline.vllm.kv import KvMemory
from syncline.vllm.live import LiveWeights
from syncline.vllm.ranks import Said, Workers

STEP_TIMEOUT_S = 120.0
"""How long a worker waits for the others at each step."""

NO_KV = KvMemory({})

_log = logging.getLogger(__name__)


class Session:
    """The state of one worker: what it serves, what is staged, and what can be undone.

    Args:
        weights: the live weights; only this session may change them.
        workers: all workers of the engine; each of them has a session.
        base: opens the checkpoint that the engine was started from.
        kv: cleared by `finish` if the version before has left values in it that are no numbers, and after
            a repair.
        timeout_s: how long to wait for the other workers at each step.

    `stage` returns at once; everything else returns when it is done, and must not overlap with a forward pass.
    """

    def __init__(
        self,
        weights: LiveWeights,
        workers: Workers,
        base: Callable[[], WeightSource],
        *,
        kv: KvMemory = NO_KV,
        timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        self.weights = weights
        self._workers = workers
        self._base = base
        self._kv = kv
        self._timeout_s = timeout_s
        self._store: Store | None = None
        self._copy: HostCopy | None = None
        self._held: HeldVersion | None = None
        self._thread: threading.Thread | None = None
        self._staged: HeldVersion | None = None
        self._error: Exception | None = None
        self._is_applied = False
        self._is_torn = False
        self._is_repair = False
        self._is_kv_finite = True
        self._apply_s = 0.0
        self._identity = uuid.uuid4().hex

    def open(self, store: str) -> None:
        """Follow this store from now on. Collective: no.

        Raises:
            ConfigError: the URL is of no kind that is known.
        """
        self._store = open_store(store)

    def stage(self, version: int | None, *, repair: bool = False) -> None:
        """Begin to fetch, decode and prove a version on the host's copy; `status` says how it stands.

        Args:
            version: its number; None: the store's current one.
            repair: start from a full version, and believe nothing that the worker says it holds.

        Raises:
            ConfigError: no store was opened, or another version is being staged or applied.
        """
        store = self._store
        if store is None:
            raise ConfigError("no store is open: open one before a version is staged")
        if self._is_staging():
            raise ConfigError("another version is being staged; wait until it is")
        if self._is_applied:
            raise ConfigError("a version was applied and not finished: finish or undo it first")
        self._staged = self._error = None

        def work() -> None:
            try:
                self._staged = self._stage(store, version, repair=repair or self._is_torn)
            except Exception as error:  # noqa: BLE001 - it is reported by whoever asks
                _log.error("syncline: staging failed: %s: %s", type(error).__name__, error)
                self._error = error

        self._thread = threading.Thread(target=work, name="syncline-stage", daemon=True)
        self._thread.start()

    def wait_staged(self, timeout_s: float | None = None) -> HeldVersion:
        """Return the staged version when it is proved. Collective: no.

        Raises:
            ConfigError: nothing is staged, or it takes longer than `timeout_s`.
            What staging raised.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        if self._staged is None:
            raise ConfigError("no version is staged: stage one, and wait until it is")
        return self._staged

    def apply(self) -> HeldVersion:
        """Write the staged version into the live weights of all workers, and prove what they hold.

        Collective: yes. `undo` takes it back until `finish`.

        Raises:
            CommitError: it failed on some worker; every worker holds its old bits again.
            TornUpdateError: putting them back failed on some worker.
        """
        target = ""
        error: Exception | None = None
        share = ZERO
        started_s = time.perf_counter()
        try:
            staged = self.wait_staged(0)
            target = staged.sha256
            self._write()
            share = self.weights.fingerprint(self._require_copy())
        except Exception as failure:  # noqa: BLE001 - all workers hear of it, and undo
            error = failure
        answers = self._gather({"target": target, "share": share.hex(), **_said(error)})
        verdict = self._verdict(answers)
        if verdict is not None:
            self._undo_together(verdict)
        self._is_applied = True
        self._apply_s = time.perf_counter() - started_s
        _log.info("syncline: version %d is in place after %.3f s", staged.version, self._apply_s)
        return staged

    def undo(self) -> None:
        """Put the old bits back on all workers; harmless if nothing was applied. Collective: yes.

        Raises:
            TornUpdateError: it failed on some worker.
        """
        self._undo_together(None)

    def finish(self) -> None:
        """Make what was applied the version that this worker holds; harmless if nothing was. Collective: no.

        Caches must have been reset, those of running requests included.
        """
        if not self._is_applied or self._staged is None:
            return
        # As long as that can fail the version can be taken back.
        if self._is_repair or not self._is_kv_finite:
            self._kv.clear()
            _log.warning("syncline: the memory of the KV cache was cleared")
        self._held, self._is_applied, self._is_torn = self._staged, False, False
        self._require_copy().settle()
        self.weights.settle()

    def together(self, do: Callable[[], None]) -> None:
        """Do something on every worker; if it fails on one, all of them raise. Collective: yes.

        Raises:
            CommitError: it failed somewhere; says where and why.
        """
        error: Exception | None = None
        try:
            do()
        except Exception as failure:  # noqa: BLE001 - all workers hear of it
            error = failure
        faults = self._faults(self._gather(_said(error)))
        if faults:
            raise CommitError(faults)

    def status(self) -> dict[str, Any]:
        """Return how this worker stands, in plain values."""
        held = None if self._is_torn else self._held
        error = self._error
        stage = "staging" if self._is_staging() else "idle"
        if stage == "idle" and error is not None:
            stage = "failed"
        elif stage == "idle" and self._staged is not None:
            stage = "staged"
        return {
            "rank": self._workers.rank,
            "workers": self._workers.count,
            "session": self._identity,
            "run_id": None if held is None else held.manifest.run_id,
            "version": None if held is None else held.version,
            "sha256": None if held is None else held.sha256,
            "stage": stage,
            "staged": None if self._staged is None else self._staged.version,
            "staged_sha256": None if self._staged is None else self._staged.sha256,
            "is_applied": self._is_applied,
            "is_torn": self._is_torn,
            "moved": None if self._copy is None else moving.told(self._copy.moved, self._apply_s),
            "stage_error": None if error is None else f"{type(error).__name__}: {error}",
        }

    def _is_staging(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _stage(self, store: Store, version: int | None, *, repair: bool) -> HeldVersion:
        if self._copy is None:
            self._copy = HostCopy(self._base())
        held = self._copy.follow(store, version, repair=repair)
        if held is None:
            raise CommitError("the copy lost its version while it was staged; stage it again")
        self._is_repair = repair
        if not repair:
            self.weights.prepare(self._copy)
        # As late as can be: the old version generates until the pause.
        self._is_kv_finite = self._kv.is_finite()
        return held

    def _require_copy(self) -> HostCopy:
        if self._copy is None:
            raise ConfigError("no version is staged: stage one, and wait until it is")
        return self._copy

    def _write(self) -> None:
        if self._is_applied:
            raise ConfigError("a version was applied and not finished: finish or undo it first")
        if self._require_copy().pending or self._is_repair:
            self.weights.write(self._require_copy(), everything=self._is_repair)

    def _verdict(self, answers: Sequence[Said]) -> Exception | None:
        """Return why the workers did not all take one version and hold its bits; None if they did."""
        faults = self._faults(answers)
        if faults:
            return CommitError(faults)
        if len({answer["target"] for answer in answers}) != 1:
            return CommitError(
                "the workers were to apply different versions: stage one number on all"
            )
        shares = (Fingerprint.from_hex(answer["share"]) for answer in answers)
        found, staged = sum(shares, ZERO), self.wait_staged(0)
        if found != staged.manifest.fingerprint:
            return VerifyError(
                f"version {staged.version}: the workers hold weights with fingerprint {found.hex()}, its "
                f"manifest says {staged.manifest.fingerprint.hex()}",
                version=staged.version,
            )
        return None

    def _undo_together(self, failure: Exception | None) -> None:
        """Put the old bits back everywhere, then raise what led to that, if anything did."""
        error: Exception | None = None
        try:
            if self._copy is not None and self._copy.pending:
                self.weights.undo(self._copy)
            self._is_applied = False
        except Exception as second:  # noqa: BLE001 - all workers hear of it
            error = second
        faults = self._faults(self._gather(_said(error)))
        if faults:
            self._is_torn = True
            raise TornUpdateError(
                f"the update failed ({failure}), and undoing it failed too ({faults}): the engine holds a mix "
                "of two versions; it stays paused until a full version has been applied"
            )
        if failure is not None:
            held = (
                "the weights it started with"
                if self._held is None
                else f"version {self._held.version}"
            )
            kind = type(failure) if isinstance(failure, SynclineError) else CommitError
            raise kind(f"{failure}; every worker was put back and serves {held}") from failure

    def _gather(self, said: Said) -> list[Said]:
        return self._workers.gather(said, self._timeout_s)

    def _faults(self, answers: Sequence[Said]) -> str:
        count = self._workers.count
        return "; ".join(
            answer["error"] if count == 1 else f"worker {rank} of {count}: {answer['error']}"
            for rank, answer in enumerate(answers)
            if answer.get("error") is not None
        )


def _said(error: Exception | None) -> Said:
    return {"error": None if error is None else f"{type(error).__name__}: {error}"}
