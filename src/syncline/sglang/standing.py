"""Whether a server that was brought to a version still stands there: the same start, generating."""

from __future__ import annotations

from typing import Literal

from syncline.errors import CommitError, SynclineError
from syncline.sglang.control import SglangHttp
from syncline.version import HeldVersion

Standing = Literal["generates", "cannot tell", "paused", "started anew", "silent"]

_LOOK_S = 10.0


def standing_of(control: SglangHttp, start: str) -> Standing:
    """Return how a server says that it stands.

    Args:
        start: what it said of its start when it was brought to its version.
    """
    try:
        if control.server(_LOOK_S).start != start:
            return "started anew"
        is_paused = control.is_paused(_LOOK_S)
    except SynclineError:  # busy or gone
        return "silent"
    if is_paused is None:
        return "cannot tell"
    return "paused" if is_paused else "generates"


def may_go_on(was_paused: bool | None, *, is_known: bool, is_torn: bool) -> bool:
    """Tell whether a server may generate with what it holds, should an update fail before it writes.

    Args:
        was_paused: it said so before the update; None: it cannot tell.
        is_known: it is known to hold the version that it names.
        is_torn: an update of this start failed and was not taken back.
    """
    # Weights that nobody knows go on where they were served anyway: a pause may be that of a torn update.
    return not is_torn and (is_known or was_paused is False)


def goes_on(control: SglangHttp, timeout_s: float) -> bool:
    """Tell a server that may have heard late of a pause of ours to go on; return whether it answered."""
    try:
        control.resume(timeout_s)  # harmless where it is not needed
    except SynclineError:  # refused, busy or gone: the next look asks again
        return False
    return True


def end_late_pause(
    control: SglangHttp, held: HeldVersion, *, may_pause_late: bool, timeout_s: float
) -> bool:
    """Let a server go on that heard late of a pause of ours; return whether it had.

    Raises:
        CommitError: somebody else has paused it.
    """
    if not control.is_paused(timeout_s):
        return False
    if not may_pause_late:
        raise CommitError(
            f"version {held.version}: expected the server to generate, found it paused by somebody else, or "
            "unhealthy (/ready answers 503); continue it (/continue_generation), or stop whoever else updates it"
        )
    control.resume(timeout_s)
    return True
