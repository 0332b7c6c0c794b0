"""A running SGLang server that a replica keeps on a store: pull beside generation, then one short commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from syncline.abc import Observe, Store
from syncline.engines import CheckpointDir
from syncline.errors import (
    CommitError,
    ConfigError,
    LayoutError,
    OutcomeUnknownError,
    TornUpdateError,
    VerifyError,
)
from syncline.sglang import proof
from syncline.sglang.answers import Checksums, Server
from syncline.sglang.broadcast import Group
from syncline.sglang.change import Change, InPlace
from syncline.sglang.commit import Commit, CommitOptions, Committed
from syncline.sglang.control import SglangHttp
from syncline.sglang.mirror import Mirror
from syncline.sglang.proof import Proof
from syncline.sglang.routes import ROUTES, Lack, Route, change_of, tidy
from syncline.sglang.standing import end_late_pause, goes_on, may_go_on, standing_of
from syncline.sync import AppliedVersion, Receiver
from syncline.sync.accounting import Moved
from syncline.sync.named import is_named
from syncline.sync.ours import as_commit_error
from syncline.sync.owner import Owner
from syncline.version import HeldVersion

_log = logging.getLogger(__name__)
_NOT_TAKEN_BACK = (TornUpdateError, OutcomeUnknownError)


class SglangServer:
    """One unmodified SGLang server, kept on the versions of a store; a `syncline.serving.Puller`.

    The checkpoint directory that the server was started from goes ahead: a version is fetched, decoded and
    proved on it while the server generates. Then one commit puts what has changed into the server. A server
    that is started anew loads the directory, and is recognised by its checksums.

    Args:
        control: the server.
        store: where versions come from.
        checkpoint: what the server was started from, or a checkpoint of the same tensors.
        staging: directory that this process and the server's ranks see under the same path; the server's
            `SYNCLINE_SGLANG_STAGING`.
        options: how a version is put in place.
        route: `in_place` needs a server with `--custom-weight-loader syncline.sglang.worker.load`; `plugin` does
            the same where Syncline's plugin is loaded (`syncline.sglang.plugin`, 0.5.20 and later). The others
            hand the tensors that have changed over whole: from `disk`, from this host's `memory` in flat
            buckets, or `distributed` over a Gloo group, `nccl` over an NCCL one. `auto`: in place where it can,
            else from disk. What nothing is known of is loaded from the checkpoint, whatever the route.
        host: an address of this machine that the server reaches, for `distributed` and `nccl`.
        observe: told of every step of pulling.
        reached: told of every step of a commit.
    """

    def __init__(
        self,
        control: SglangHttp,
        store: Store,
        checkpoint: CheckpointDir,
        staging: Path,
        *,
        options: CommitOptions | None = None,
        route: Route = "auto",
        host: str = "127.0.0.1",
        observe: Observe | None = None,
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        if route not in ROUTES:
            raise ConfigError(f"route: expected one of {', '.join(ROUTES)}, found {route!r}")
        self._control = control
        self._staging = staging.absolute()
        self._owner = Owner(self._staging)
        self._mirror = Mirror(checkpoint, self._staging)
        self._receiver = Receiver(store, self._mirror, observe=observe)
        self._options = CommitOptions() if options is None else options
        self._route = route
        self._host = host
        self._group: Group | None = None
        self._reached = reached
        self._held: HeldVersion | None = None
        self._checksum: str | None = None
        self._start = ""
        self._is_torn = False
        self._may_pause_late = False
        self._last: Committed | None = None
        self._dense = self._changed = 0
        self._stage_s = 0.0

    def sync(self, version: int | None = None, *, repair: bool = False) -> Committed | None:
        """Bring the server to a version, by default the store's current one; see `Receiver.sync`.

        Args:
            repair: believe nothing: compare the checkpoint with the store, and load all of it.

        Returns:
            what the commit took; None if the server had the version.

        Raises:
            TornUpdateError, OutcomeUnknownError: what the server holds is not known, and it stays paused;
                the next call loads everything.
            SynclineError: the server serves what it served.
        """
        with as_commit_error("the update failed, and the server serves what it served"):
            return self._sync(version, repair=repair)

    def _sync(self, version: int | None, *, repair: bool) -> Committed | None:
        step_s = self._options.step_timeout_s
        about = self._control.server(step_s)
        rules = self._control.rules(about.version, step_s)
        about.check_served()
        if self._owner.claim(about.start):
            self._doubt()
        self._look(about)
        if not repair and self._options.proves and rules.has_checksums:
            self._recognise(about)
        if self._held is not None and end_late_pause(
            self._control, self._held, may_pause_late=self._may_pause_late, timeout_s=step_s
        ):
            self._may_pause_late = False
        started_s = time.monotonic()
        pulled = self._pull(version, repair=repair)
        self._stage_s = time.monotonic() - started_s
        target = self._mirror.held()
        if target is None:
            raise LayoutError(f"{self._mirror.path} holds no version; pull one into it first")
        is_known = self._held is not None
        if repair:
            self._lose()
        if self._held is not None and self._held.sha256 == target.sha256:
            return None
        lack = Lack(about, self._staging, self._held, target, self._mirror.pending_to(target))
        change = self._staged(lack)
        commit = Commit(self._control, rules, self._options, about.tensor_ranks, self._reached)
        was_paused = self._control.is_paused(step_s)
        may = may_go_on(was_paused, is_known=is_known, is_torn=self._is_torn)
        if lack.pending is None:
            commit.close_left_open()
        proof.forget(self._staging)
        try:
            is_told = lack.pending is not None and not about.moves_experts
            known = self._checksum if is_told else None
            done = commit.put(change, str(target.version), known, may_go_on=may)
        except BaseException as error:
            # What interrupts, a signal for one, may have interrupted the taking back.
            was_taken_back = isinstance(error, Exception) and not isinstance(error, _NOT_TAKEN_BACK)
            if not was_taken_back:
                self._lose()
                self._is_torn = True
            raise
        finally:
            self._may_pause_late |= commit.may_pause_late
            tidy(self._staging)
        self._changed = len(self._mirror.changed)
        self._dense = len(change.dense) if isinstance(change, InPlace) else self._changed
        # A pause and its end were answered after it: where nothing more can be seen, it is not waited for.
        self._may_pause_late &= was_paused is not None
        self._settle(target, done.checksums)
        self._last = _told(done, pulled.moved)
        return self._last

    def held(self) -> HeldVersion | None:
        """Return the version that the server was brought to; None if that is not known."""
        return self._held

    def is_serving(self) -> bool:
        """Tell whether the server generates with the version that it was brought to, as far as it says so itself.

        It answers, names the version, was not started anew, and is not paused.
        """
        if self._held is None:
            return False
        if not is_named(self._control, self._held):
            self._doubt()
            return False
        standing = standing_of(self._control, self._start)
        if standing == "started anew":
            self._doubt()
        elif standing == "cannot tell" and self._may_pause_late:
            return goes_on(self._control, self._options.step_timeout_s)
        return standing in ("generates", "cannot tell")

    def figures(self) -> Mapping[str, float]:
        """Return what the last commit took, by name of the metric."""
        if self._last is None:
            return {}
        return {
            "syncline_stage_seconds": self._stage_s,
            "syncline_pause_seconds": self._last.pause_s,
            "syncline_apply_seconds": self._last.send_s,
            "syncline_changed_tensors": float(self._changed),
            "syncline_dense_tensors": float(self._dense),
        }

    def _look(self, about: Server) -> None:
        """See whether the server is the one that was brought to a version, and names it."""
        is_same = about.start == self._start
        self._start = about.start
        self._is_torn &= is_same
        if self._held is not None and not (is_same and about.label == str(self._held.version)):
            self._doubt()

    def _recognise(self, about: Server) -> None:
        """Find out by its checksums whether a server that nothing is known of holds the checkpoint's version."""
        known, held = proof.read(self._staging), self._mirror.held()
        if self._held is not None or known is None or held is None:
            return
        if known.sha256 != held.sha256:
            return
        found = self._control.checksums(self._options.load_timeout_s)
        if found.engine != known.checksum:
            return
        if about.label != str(held.version):
            self._control.set_label(str(held.version), self._options.step_timeout_s)
        self._control.resume(self._options.step_timeout_s)  # whoever paused it may have died
        self._held, self._checksum, self._is_torn = held, known.checksum, False
        self._mirror.settle(held)

    def _settle(self, target: HeldVersion, found: Checksums | None) -> None:
        """Note what the server took; where that cannot be written, a restarted follower loads it again."""
        self._held, self._is_torn = target, False
        self._mirror.settle(target)
        self._checksum = None if found is None else found.engine
        if self._checksum is None:
            return
        try:
            proof.write(self._staging, Proof(target.sha256, self._checksum))
        except CommitError as error:
            _log.warning("syncline: %s", error)

    def _pull(self, version: int | None, *, repair: bool) -> AppliedVersion:
        """Bring the checkpoint to a version; what the server lacks of it is kept."""
        try:
            return self._receiver.sync(version)
        except (VerifyError, LayoutError):
            if not repair:
                raise
        return self._receiver.sync(version, repair=True)

    def _staged(self, lack: Lack) -> Change:
        """Stage what the server lacks; a damaged checkpoint is repaired, if all of it is to be loaded.

        Raises:
            VerifyError: changes do not lead to the version: all of it is to be loaded next time.
        """

        def change() -> Change:
            return change_of(
                lack, self._mirror, self._route, lambda: self._joined(lack.about.tensor_ranks)
            )

        try:
            return change()
        except VerifyError:
            self._mirror.lose()
            if lack.pending is not None:
                raise
        self._receiver.sync(lack.target.version, repair=True)
        return change()

    def _joined(self, ranks: int) -> Group:
        """Return the group with this server's ranks; it lasts as long as nothing fails."""
        if self._group is not None and self._group.is_broken:
            self._leave()
        if self._group is None:
            self._group = Group(
                self._control,
                ranks,
                backend="nccl" if self._route == "nccl" else "gloo",
                host=self._host,
                timeout_s=self._options.step_timeout_s,
            )
        return self._group

    def _doubt(self) -> None:
        """Note that the server may have been started anew, or written by somebody else: checksums will tell."""
        self._held = self._checksum = None
        self._mirror.lose()
        self._leave()

    def close(self) -> None:
        """Let the server leave the group, if there is one, and let others follow it."""
        self._leave()
        self._owner.release()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _lose(self) -> None:
        """Note that what the server holds is not known."""
        self._doubt()
        proof.forget(self._staging)


def _told(done: Committed, pulled: Moved | None) -> Committed:
    """Return what a commit took with what pulling took before it; the server's loading is a reload."""
    if pulled is None:
        return done
    more = {"reload": done.send_s, "flush": done.flush_s}
    return replace(done, moved=pulled.and_then(more, done.pause_s))
