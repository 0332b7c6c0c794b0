"""The order of an update: pause, begin, put in, end, flush, prove, name, go on.

No call carries a version or a flush of its own: the version's name is set when everything else has
succeeded. Until then everything can be taken back, and is if anything fails: then the server serves its
old weights under their old name. Where that fails too the server stays paused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from syncline.errors import (
    CommitError,
    ConfigError,
    EndpointError,
    FormatError,
    OutcomeUnknownError,
    PeerLostError,
    SynclineError,
    TornUpdateError,
    TransportTimeoutError,
)
from syncline.sglang.answers import Checksums
from syncline.sglang.change import Change, StrangeWeightsError
from syncline.sglang.control import PauseMode, SglangHttp
from syncline.sglang.versions import Rules
from syncline.sync.accounting import Moved

STEPS = ("paused", "begun", "sent", "ended", "flushed", "proved", "labelled")
MODES = ("retract", "in_place", "abort")


@dataclass(frozen=True, slots=True)
class CommitOptions:
    """How a version is put in place.

    Attributes:
        pause: what becomes of running requests. `retract` puts them back into the queue, to go on with the
            new weights and with keys and values computed by them; `abort` ends them; `in_place` freezes
            them with old keys and values, so that the cache cannot be flushed and the update is refused
            while there is one. None: `retract` where the server can flush then, else `abort`.
        proves: ask for checksums, which read every weight: they are what a restarted follower knows the
            server by.
        step_timeout_s: longest that each call may take.
        load_timeout_s: longest that putting weights in may take.
    """

    pause: PauseMode | None = None
    proves: bool = True
    step_timeout_s: float = 120.0
    load_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.pause is not None and self.pause not in MODES:
            raise ConfigError(f"pause: expected one of {', '.join(MODES)}, found {self.pause!r}")
        if not self.step_timeout_s > 0 or not self.load_timeout_s > 0:
            raise ConfigError("timeouts must be above 0")

    def mode(self, rules: Rules) -> PauseMode:
        """Return how to pause a server.

        Raises:
            ConfigError: it cannot flush its cache while requests that were retracted wait.
        """
        if self.pause is None:
            return "retract" if rules.flushes_retracted else "abort"
        if self.pause == "retract" and not rules.flushes_retracted:
            raise ConfigError(
                "pause 'retract': this SGLang cannot flush its cache while retracted requests wait (0.5.21 "
                "and later can), so they would go on with keys and values of old weights; use 'abort'"
            )
        return self.pause


@dataclass(frozen=True, slots=True)
class Committed:
    """What one commit took.

    Attributes:
        label: the version's name.
        route: how the weights were put in.
        pause_s: seconds from the pause until generation went on; `send_s`: of these, of the weights.
        flush_s: of these, of flushing its caches.
        checksums: what the server holds, by its own account; None where they were not asked for.
        moved: bytes and seconds by phase, of pulling and of the server; None where the server pulls by itself.
    """

    label: str
    route: str
    pause_s: float
    send_s: float
    flush_s: float
    checksums: Checksums | None
    moved: Moved | None = None


class Commit:
    """One update of one server.

    Args:
        rules: how this server wants to be updated.
        ranks: how many it has.
        reached: told of every step in `STEPS`; may raise, which is a failure of that step.

    Attributes:
        may_pause_late: the server did not say whether it paused, and may still do so.
    """

    may_pause_late = False

    def __init__(
        self,
        control: SglangHttp,
        rules: Rules,
        options: CommitOptions,
        ranks: int,
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._control = control
        self._rules = rules
        self._options = options
        self._ranks = ranks
        self._reached = reached
        self._is_open = False
        self._found: Checksums | None = None
        self._step_s = options.step_timeout_s

    def put(
        self, change: Change, label: str, known: str | None = None, *, may_go_on: bool
    ) -> Committed:
        """Put a change in, and name it; or leave the server as it was.

        Args:
            known: SGLang's checksum of what the server must hold before; None: it is not known.
            may_go_on: it may generate with what it holds, under the name that it has; see `standing.may_go_on`.

        Raises:
            TornUpdateError: it failed, and so did taking it back; generation stays paused.
            OutcomeUnknownError: the server did not say what it did, or it failed before anything was written to
                a server that may not go on; the same.
            SynclineError: it failed, and was taken back: the old weights are served, under their name.
        """
        control, step_s = self._control, self._step_s
        before = control.label(step_s)
        started_s = time.monotonic()
        send_s = flush_s = 0.0
        checksums = None
        mode = self._options.mode(self._rules)
        try:
            self._pause(mode)
            self._reached("paused")
            self._look(known)
            self._open(change)
            self._reached("begun")
            sent_s = time.monotonic()
            change.send(control, self._options.load_timeout_s)
            self._try_again(change)
            change.check()
            send_s = time.monotonic() - sent_s
            self._reached("sent")
            self._close()
            self._reached("ended")
            flushed_s = time.monotonic()
            control.flush(step_s)
            flush_s = time.monotonic() - flushed_s
            self._reached("flushed")
            checksums = self._checksums()
            self._check_done(change, checksums)
            self._reached("proved")
            self._name(before, label)
            self._reached("labelled")
        except BaseException as error:
            self._take_back(change, before, error, may_go_on)
            raise
        self._go_on(label)
        pause_s = time.monotonic() - started_s
        return Committed(label, change.name, pause_s, send_s, flush_s, checksums)

    def close_left_open(self) -> None:
        """Close a session that somebody who died left open: what it wrote is then to be replaced as a whole."""
        if self._rules.needs_session:
            with suppress(EndpointError):
                self._control.end(self._step_s)

    def _checksums(self) -> Checksums | None:
        """Return what the server holds, by its own account; None where it is not to be asked."""
        if not (self._options.proves and self._rules.has_checksums):
            return None
        found = self._control.checksums(self._options.load_timeout_s)
        if len(found.ranks) != self._ranks:
            raise FormatError(
                f"/weights_checker: expected checksums of {self._ranks} ranks, found {len(found.ranks)}"
            )
        return found

    def _look(self, known: str | None) -> None:
        """Note what the server holds, and check that it is what it was left with."""
        self._found = self._checksums()
        if known is None or self._found is None or self._found.engine == known:
            return
        raise StrangeWeightsError(
            f"the server's checksum was {known} after the last update, and is {self._found.engine} now: somebody "
            "else wrote its weights; it stays paused until all of them have been loaded"
        )

    def _check_done(self, change: Change, after: Checksums | None) -> None:
        """Check that a change which must show does.

        Raises:
            CommitError: the server holds what it held.
        """
        if change.shows and after is not None and after == self._found:
            raise CommitError(
                f"{change.name}: the server answers that it took the weights, and holds what it held before"
            )

    def _try_again(self, change: Change) -> None:
        """See that a load of everything which changed nothing was one: load something else, and everything again.

        Raises:
            CommitError: the server answers with success, and loads nothing.
        """
        if change.trial is None or self._found is None or self._checksums() != self._found:
            return
        load_s = self._options.load_timeout_s
        self._control.load_directory(str(change.trial), load_s)
        if self._checksums() == self._found:
            raise CommitError(
                f"{change.name}: the server answers that it has loaded {change.trial}, and holds what it held before"
            )
        change.send(self._control, load_s)

    def _pause(self, mode: PauseMode) -> None:
        try:
            self._control.pause(mode, self._step_s)
        except (TransportTimeoutError, PeerLostError):
            self.may_pause_late = True
            raise

    def _name(self, before: str, label: str) -> None:
        """Name the version, if the name is still the one that was replaced, and see that the server took it."""
        found = self._control.label(self._step_s)
        if found != before:
            raise StrangeWeightsError(
                f"the server was named {before!r} when this update began, and is {found!r} now: somebody else "
                "updates it; stop one of the two"
            )
        self._control.set_label(label, self._step_s)
        found = self._control.label(self._step_s)
        if found != label:
            raise CommitError(f"the server was told the name {label!r} and says {found!r}")

    def _go_on(self, label: str) -> None:
        try:
            self._control.resume(self._step_s)
        except SynclineError as error:
            raise OutcomeUnknownError(
                f"version {label} is in place, but the server may not go on generating ({error}); it is loaded "
                "again"
            ) from error

    def _open(self, change: Change) -> None:
        if not (self._rules.needs_session and change.in_session) or self._is_open:
            return
        try:
            self._control.begin(self._step_s)
        except EndpointError as error:
            raise StrangeWeightsError(
                f"{error}; somebody else updates this server, or died doing so, and its weights are not known"
            ) from error
        self._is_open = True

    def _reopen(self, change: Change) -> None:
        """Open the session again, which a call that failed may have closed, or not."""
        if self._rules.needs_session and change.in_session:
            with suppress(EndpointError):
                self._control.begin(self._step_s)
            self._is_open = True

    def _close(self) -> None:
        if self._is_open:
            self._control.end(self._options.load_timeout_s)
            self._is_open = False

    def _take_back(self, change: Change, label: str, error: BaseException, may_go_on: bool) -> None:
        """Put the old weights and the old name back, and go on generating.

        Raises:
            TornUpdateError, OutcomeUnknownError: that failed.
        """
        if isinstance(error, StrangeWeightsError):
            return
        if not (may_go_on or change.has_begun):
            if isinstance(error, Exception):
                raise OutcomeUnknownError(_left_held(error)) from error
            return
        control, step_s = self._control, self._step_s
        try:
            self._reopen(change)
            change.undo(control, self._options.load_timeout_s)
            self._close()
            self._check_undone(change)
            # The cache was computed by these weights, and nothing has run since: it stays.
            if control.label(step_s) != label:
                control.set_label(label, step_s)
            control.resume(step_s)
        except TornUpdateError as second:
            raise TornUpdateError(_failed(error, second)) from second
        except Exception as second:
            # Whatever it is: the server is not as it was.
            raise OutcomeUnknownError(_failed(error, second)) from second

    def _check_undone(self, change: Change) -> None:
        if self._found is None or not change.has_begun:
            return
        found = self._checksums()
        if found != self._found:
            raise TornUpdateError(
                f"{change.name}: the server answers that it took the old weights, and does not hold them"
            )


def _left_held(error: BaseException) -> str:
    return (
        f"the update failed before it wrote anything ({type(error).__name__}: {error}), and what the server holds "
        "is not known: it did not say that it was generating before, or an update of it has failed; it is not told "
        "to go on until a full version has been loaded"
    )


def _failed(error: BaseException, second: BaseException) -> str:
    return (
        f"the update failed ({type(error).__name__}: {error}), and taking it back failed too "
        f"({type(second).__name__}: {second}): what the server holds is not known; it stays paused until a "
        "full version has been loaded"
    )
