"""A patched SGLang with `/pull_weights` (slime's and miles' build): every host patches a local checkpoint itself.

Syncline publishes in the slime layout and tells the server; the rest is the same order of an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from syncline.abc import Store
from syncline.errors import (
    BaseVersionError,
    ConfigError,
    OutcomeUnknownError,
    TornUpdateError,
)
from syncline.sglang.change import FromDirectory
from syncline.sglang.commit import Commit, CommitOptions, Committed
from syncline.sglang.control import PULL, SglangHttp
from syncline.sglang.proved import Unseen
from syncline.sglang.standing import end_late_pause, goes_on, may_go_on, standing_of
from syncline.sync.layout import own_history
from syncline.sync.named import is_named
from syncline.sync.ours import as_commit_error
from syncline.sync.owner import Owner
from syncline.version import HeldVersion


class PullingServer:
    """One such server, kept on the versions of a store; a `syncline.serving.Puller`.

    Args:
        control: the server.
        store: that a `Publisher(store, layout="slime", ...)` writes.
        source: where the server's hosts find the same store.
        local: the checkpoint directory on every host that the server patches, and loads.
        options: how a version is put in place.

    What the server pulls is proved by itself; a version whose load failed cannot be taken back, since the
    local checkpoint has moved on: the server stays paused until it has loaded a version.
    """

    def __init__(
        self,
        control: SglangHttp,
        store: Store,
        source: str,
        local: str,
        options: CommitOptions | None = None,
    ) -> None:
        self._control = control
        self._store = store
        self._source = source
        self._local = local
        self._options = CommitOptions() if options is None else options
        self._owner = Owner(None)
        self._start = ""
        self._is_torn = False
        self._may_pause_late = False
        self._held: HeldVersion | None = None
        self._last: Committed | None = None

    def sync(self, version: int | None = None, *, repair: bool = False) -> Committed | None:
        """Bring the server to a version, by default the store's current one; see `server.SglangServer.sync`.

        Raises:
            ConfigError: the server cannot pull, or is of a kind that `SglangServer` refuses, too.
            BaseVersionError: an older version than the one it has: a local checkpoint goes forward alone.
        """
        with as_commit_error("the update failed, and the server serves what it served"):
            return self._sync(version, repair=repair)

    def _sync(self, version: int | None, *, repair: bool) -> Committed | None:
        step_s, load_s = self._options.step_timeout_s, self._options.load_timeout_s
        about = self._control.server(step_s)
        rules = self._control.rules(about.version, step_s)
        about.check_served()
        if self._owner.claim(about.start) or about.start != self._start:
            self._is_torn &= about.start == self._start
            self._held, self._start = None, about.start
        if self._held is not None and end_late_pause(
            self._control, self._held, may_pause_late=self._may_pause_late, timeout_s=step_s
        ):
            self._may_pause_late = False
        if not self._control.has(PULL, step_s):
            raise ConfigError(
                f"expected a server with the route {PULL}, found SGLang {about.version} without it; keep it with "
                "syncline.sglang.server.SglangServer"
            )
        target = own_history(self._store).target(version)
        if self._held is not None and not repair:
            if self._held.sha256 == target.sha256 and self.is_serving():
                return None
            if target.version < self._held.version:
                raise BaseVersionError(
                    f"the server's checkpoint is at version {self._held.version} and cannot go back to "
                    f"{target.version}; start it from a fresh local directory",
                    version=target.version,
                )
        self._control.pull(self._local, self._source, target.version, load_s)
        commit = Commit(self._control, rules, self._options, about.tensor_ranks)
        before = None if self._held is None else self._held.manifest.fingerprint
        change = FromDirectory(
            Unseen(Path(self._local)),
            None,
            shows=before is not None and before != target.manifest.fingerprint,
        )
        was_paused = self._control.is_paused(step_s)
        may = may_go_on(was_paused, is_known=self._held is not None, is_torn=self._is_torn)
        try:
            self._last = commit.put(change, str(target.version), may_go_on=may)
        except BaseException as error:
            is_taken_back = isinstance(error, Exception) and not isinstance(
                error, (TornUpdateError, OutcomeUnknownError)
            )
            if not is_taken_back:
                self._held, self._is_torn = None, True
            raise
        finally:
            self._may_pause_late |= commit.may_pause_late
        self._held, self._is_torn = target, False
        # A pause and its end were answered after it: where nothing more can be seen, it is not waited for.
        self._may_pause_late &= was_paused is not None
        return self._last

    def held(self) -> HeldVersion | None:
        """Return the version that the server was brought to; None if that is not known."""
        return self._held

    def is_serving(self) -> bool:
        """Tell whether the server generates with the version that it was brought to, as far as it says so itself."""
        if not is_named(self._control, self._held):
            self._held = None
            return False
        standing = standing_of(self._control, self._start)
        if standing == "started anew":
            self._held = None
        elif standing == "cannot tell" and self._may_pause_late:
            return goes_on(self._control, self._options.step_timeout_s)
        return standing in ("generates", "cannot tell")

    def close(self) -> None:
        """Let others follow the server."""
        self._owner.release()

    def figures(self) -> Mapping[str, float]:
        """Return what the last commit took, by name of the metric."""
        if self._last is None:
            return {}
        return {
            "syncline_pause_seconds": self._last.pause_s,
            "syncline_apply_seconds": self._last.send_s,
        }
