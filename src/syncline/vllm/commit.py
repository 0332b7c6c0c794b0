"""The order of a commit: stage while it generates, pause, apply, prove, forget the caches, name, resume.

Until the last step everything can be taken back, and is if anything fails: then every worker holds its
old bits, outputs carry the old version's name, and generation goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from syncline.errors import (
    CommitError,
    ConfigError,
    OutcomeUnknownError,
    TornUpdateError,
    TransportTimeoutError,
)
from syncline.sync.accounting import Moved
from syncline.vllm import moving
from syncline.vllm.answers import (
    check_engines,
    check_held,
    check_not_torn,
    checked,
    is_one,
    name_of,
    staged_by,
    whole,
)
from syncline.vllm.control import Answers, Control, PauseMode

MODES = ("keep", "wait", "abort")
STEPS = (
    "staged",
    "pausing",
    "paused",
    "applied",
    "caches_reset",
    "labelled",
    "finished",
    "resumed",
)


@dataclass(frozen=True, slots=True)
class CommitOptions:
    """How a version is put in place.

    Attributes:
        pause: what becomes of requests that run: `keep` freezes them, and they go on with the new weights,
            their keys and values computed again; `wait` lets them end first; `abort` ends them now.
        stage_timeout_s: longest that fetching, decoding and proving may take, beside generation.
        drain_timeout_s: longest that the pause may take to come about: with `wait`, the longest request.
        step_timeout_s: longest that each step of the pause may take.
        poll_s: how often workers are asked whether they have staged.
    """

    pause: PauseMode = "keep"
    stage_timeout_s: float = 1800.0
    drain_timeout_s: float = 300.0
    step_timeout_s: float = 120.0
    poll_s: float = 0.05

    def __post_init__(self) -> None:
        if self.pause not in MODES:
            raise ConfigError(f"pause: expected one of {', '.join(MODES)}, found {self.pause!r}")
        times = (self.stage_timeout_s, self.drain_timeout_s, self.step_timeout_s, self.poll_s)
        if not all(value > 0 for value in times):
            raise ConfigError(f"timeouts must be above 0, found {times}")


@dataclass(frozen=True, slots=True)
class Committed:
    """What one commit took.

    Attributes:
        version: its number.
        stage_s: seconds of staging, beside generation; `pause_s`: from the pause to the resume, 0 without
            one; `apply_s`: of these, what the workers took.
        moved: bytes to all workers and seconds by phase, over all of them, staging included; None where nothing
            had to be put in, or a worker does not say.
    """

    version: int
    stage_s: float
    pause_s: float
    apply_s: float
    moved: Moved | None = None


def bring(
    control: Control,
    store: str,
    version: int,
    options: CommitOptions,
    *,
    sha256: str | None = None,
    repair: bool = False,
    reached: Callable[[str], None] = lambda _: None,
) -> Committed:
    """Bring a running vLLM to a version of a store, or leave it as it was.

    Args:
        store: path or URL, as the workers see it.
        sha256: digest of the version's manifest, which the workers' store must have too; None: not compared.
        repair: start from a full version, and believe nothing that the workers say they hold.
        reached: told of every step in `STEPS`; may raise, which is a failure of that step.

    Raises:
        ConfigError: several engines generate behind this vLLM; nothing was touched.
        CommitError: a worker could not stage or apply it; the old version is served on.
        TransportTimeoutError, TransportError: a step did not end in time or failed; the same.
        TornUpdateError: workers could not put their old bits back; generation stays paused.
        OutcomeUnknownError: the vLLM did not answer whether it put them back; generation may stay paused.
    """
    step_s = options.step_timeout_s
    # vLLM looks at its environment before it answers this for the first time, and generates meanwhile.
    check_engines(control.engines(options.stage_timeout_s))
    old_label = _settle(control, step_s)
    started_s = time.monotonic()
    checked("open", control.call("syncline_open", store, timeout_s=step_s))
    repaired = "yes" if repair else ""
    checked("stage", control.call("syncline_stage", str(version), repaired, timeout_s=step_s))
    statuses = _wait_staged(control, version, options)
    target = staged_by(statuses, version, sha256)
    stage_s = time.monotonic() - started_s
    reached("staged")
    if not repair and all(status.get("sha256") == target for status in statuses):
        _name(control, str(version), step_s)
        return Committed(version, stage_s, 0.0, 0.0)
    paused_s = time.monotonic()
    apply_s = 0.0
    is_finishing = False
    try:
        reached("pausing")
        control.pause(options.pause, options.drain_timeout_s)
        reached("paused")
        applied_s = time.monotonic()
        checked("apply", control.call("syncline_apply", timeout_s=step_s))
        apply_s = time.monotonic() - applied_s
        reached("applied")
        flushed_s = time.monotonic()
        control.reset_caches(step_s)
        flush_s = time.monotonic() - flushed_s
        reached("caches_reset")
        _name(control, str(version), step_s)
        reached("labelled")
        is_finishing = True
        finished = checked("finish", control.call("syncline_finish", timeout_s=step_s))
        check_held(finished, [target] * len(finished))
        reached("finished")
    except TornUpdateError:
        raise
    except BaseException as error:
        if not (is_finishing and _has_gone_on(control, version, target, step_s, error)):
            _take_back(control, statuses, old_label, step_s, error)
        raise
    control.resume(step_s)
    reached("resumed")
    pause_s = time.monotonic() - paused_s
    moved = moving.heard(finished, flush_s, stage_s + pause_s)
    return Committed(version, stage_s, pause_s, apply_s, moved)


def _settle(control: Control, step_s: float) -> str:
    """Take back what a driver that died has left applied or named, and go on generating; return the name.

    A mix of two versions stays as it is, paused.
    """
    statuses = whole(control.call("syncline_status", timeout_s=step_s))
    is_left = any(status.get("is_applied") for status in statuses)
    if is_left:
        statuses = checked("undo", control.call("syncline_undo", timeout_s=step_s))
    label = control.label(step_s)
    name = name_of(statuses, label)
    if is_one(statuses) and (is_left or label != name):
        if label != name:
            _name(control, name, step_s)
        control.resume(step_s)
    return name


def _take_back(
    control: Control, before: Answers, old_label: str, step_s: float, error: BaseException
) -> None:
    """Put the old bits and the old name back and go on generating.

    Args:
        before: how the workers stood; a mix of two versions is not gone on with.
    """
    try:
        undone = checked("undo", control.call("syncline_undo", timeout_s=step_s))
        check_held(undone, [status.get("sha256") for status in before])
        check_not_torn(undone)
        name = name_of(undone, old_label)
        if control.label(step_s) != name:
            _name(control, name, step_s)
        control.resume(step_s)
    except TornUpdateError:
        raise
    except Exception as second:  # whatever it is: the engine is not as it was
        raise _unknown(error, second) from second


def _has_gone_on(
    control: Control, version: int, target: str, step_s: float, error: BaseException
) -> bool:
    """Finish on all workers if it is known of one that it has; return False if none of them has.

    One that has finished cannot take it back any more: to take it back on the others would make a mix.
    """
    try:
        statuses = whole(control.call("syncline_status", timeout_s=step_s))
        if all(status.get("is_applied") or status.get("sha256") != target for status in statuses):
            return False
        finished = checked("finish", control.call("syncline_finish", timeout_s=step_s))
        check_held(finished, [target] * len(finished))
        if control.label(step_s) != str(version):
            _name(control, str(version), step_s)
        control.resume(step_s)
    except Exception as second:  # whatever it is: the engine is not as it was
        raise _unknown(error, second) from second
    return True


def _unknown(error: BaseException, second: Exception) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"the update failed ({type(error).__name__}: {error}), and whether it was taken back is not known "
        f"({type(second).__name__}: {second}); what vLLM serves is not known until an update succeeds"
    )


def _wait_staged(control: Control, version: int, options: CommitOptions) -> Answers:
    until_s = time.monotonic() + options.stage_timeout_s
    while True:
        statuses = whole(control.call("syncline_status", timeout_s=options.step_timeout_s))
        # A worker that failed is reported when the others have ended, so that all can stage again.
        if all(status.get("stage") != "staging" for status in statuses):
            return checked("stage", checked("stage", statuses), "stage_error")
        if time.monotonic() > until_s:
            raise TransportTimeoutError(
                f"version {version} was not staged in {options.stage_timeout_s:.3g} s; nothing was changed",
                version=version,
            )
        time.sleep(options.poll_s)


def _name(control: Control, label: str, step_s: float) -> None:
    """Name what is served, and see that the name was taken."""
    control.set_label(label, step_s)
    found = control.label(step_s)
    if found != label:
        raise CommitError(f"vLLM was told the name {label!r} and says {found!r}")
