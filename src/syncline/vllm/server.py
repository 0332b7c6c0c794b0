"""A vLLM as what a `Replica` keeps on a store: its workers pull by themselves, it only has to be told."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.abc import Store
from syncline.errors import (
    CommitError,
    EndpointError,
    OutcomeUnknownError,
    SynclineError,
    TornUpdateError,
)
from syncline.sync.layout import own_history
from syncline.sync.named import is_named
from syncline.sync.ours import as_commit_error
from syncline.sync.owner import Owner
from syncline.version import HeldVersion
from syncline.vllm.answers import check_held, checked, whole
from syncline.vllm.commit import CommitOptions, Committed, bring
from syncline.vllm.control import Control

_LOOK_S = 10.0


class VllmServer:
    """One running vLLM; see `syncline.serving.Replica`, whose engine it can be.

    Args:
        control: reaches the vLLM.
        store: where versions come from, as this process sees it.
        url: the same as the workers see it.
        options: how a version is put in place.

    The first sync makes a vLLM go on that it finds paused: whoever followed before may have died meanwhile.
    """

    def __init__(
        self, control: Control, store: Store, url: str, options: CommitOptions | None = None
    ) -> None:
        self._control = control
        self._store = store
        self._url = url
        self._options = CommitOptions() if options is None else options
        self._held: HeldVersion | None = None
        self._last: Committed | None = None
        self._has_resumed = False
        self._owner = Owner()

    def sync(self, version: int | None, *, repair: bool = False) -> Committed:
        """Bring the vLLM to a version, by default the store's current one; see `commit.bring`.

        Raises:
            CommitError: another process of this host follows it, or somebody has paused it; nothing was touched.
            Or as `commit.bring`.
        """
        with as_commit_error("the update failed, and the vLLM serves what it served"):
            self._look()
            self._owner.claim(self._session())
            target = own_history(self._store).target(version)
            self._check_going()
            self._last = self._brought(target, repair=repair)
        self._held, self._has_resumed = target, True
        return self._last

    def _brought(self, target: HeldVersion, *, repair: bool) -> Committed:
        """Put a version in place, and note what is not known where that fails."""
        steps: list[str] = []
        try:
            with as_commit_error("the update failed, and the vLLM serves what it served"):
                done = bring(
                    self._control,
                    self._url,
                    target.version,
                    self._options,
                    sha256=target.sha256,
                    repair=repair,
                    reached=steps.append,
                )
                if not self._has_resumed:
                    self._control.resume(self._options.step_timeout_s)
        except (TornUpdateError, OutcomeUnknownError):
            self._held, self._has_resumed = None, False
            raise
        except SynclineError as error:
            self._has_resumed &= not _may_pause(steps, error)
            self._look()
            raise
        return done

    def close(self) -> None:
        """Let another follower have it; harmless if it is not ours."""
        self._owner.release()

    def _session(self) -> str:
        """Return what tells this start of the vLLM from all others."""
        timeout_s = self._options.step_timeout_s
        first = checked("status", self._control.call("syncline_status", timeout_s=timeout_s))[0]
        return str(first.get("session"))

    def _check_going(self) -> None:
        """Check that nobody else holds generation; what a follower of ours left paused is gone on with.

        Raises:
            CommitError: somebody does.
        """
        if self._has_resumed and self._control.paused(self._options.step_timeout_s):
            raise CommitError(
                "expected vLLM to generate, found it paused by somebody else; let it go on (POST /resume), or stop "
                "whoever else drives it"
            )

    def held(self) -> HeldVersion | None:
        """Return the version that was last put in place; None if that is not known."""
        return self._held

    def is_serving(self) -> bool:
        """Tell whether the vLLM generates with the version that it was brought to.

        It answers, names the version, is not paused, and every worker says that it holds it, by digest: a name alone
        may be anybody's.
        """
        if self._look() is None:
            return False
        try:
            return not self._control.paused(_LOOK_S)
        except SynclineError:
            return False

    def _look(self) -> HeldVersion | None:
        """Return the version that the vLLM was brought to; forget it if the vLLM does not say that it holds it."""
        if self._held is not None and not _holds(self._control, self._held):
            self._held = None
        return self._held

    def figures(self) -> Mapping[str, float]:
        """Return what the last commit took, by name of the metric."""
        return {} if self._last is None else figures_of(self._last)


def _holds(control: Control, held: HeldVersion) -> bool:
    if not is_named(control, held):
        return False
    try:
        statuses = whole(control.call("syncline_status", timeout_s=_LOOK_S))
        check_held(statuses, [held.sha256] * len(statuses))
    except SynclineError:
        return False
    return True


def _may_pause(steps: list[str], error: SynclineError) -> bool:
    """Tell whether a pause of ours stays: one that was not answered may come about late, one may not have ended."""
    last = steps[-1] if steps else ""
    return last == "finished" or (last == "pausing" and not isinstance(error, EndpointError))


def figures_of(done: Committed) -> Mapping[str, float]:
    """Return what a commit took, by name of the metric."""
    return {
        "syncline_stage_seconds": done.stage_s,
        "syncline_pause_seconds": done.pause_s,
        "syncline_apply_seconds": done.apply_s,
    }
