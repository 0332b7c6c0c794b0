"""What is to be put into a server, and the ways there are: in place, from a directory."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Protocol

from syncline.errors import CommitError, EndpointError, LayoutError, TornUpdateError
from syncline.layouts.blocks import overlap
from syncline.sglang import staged
from syncline.sglang.control import SglangHttp
from syncline.sglang.proved import Loadable
from syncline.sglang.staged import Act, Answer, Order
from syncline.types import Fingerprint
from syncline.version import PartEntry

LOADER = "syncline.sglang.worker.load"
"""What a server's `--custom-weight-loader` must list for changes in place."""

NOTHING = "gAJdLg=="
"""A payload that says nothing, an empty list as SGLang's own serializer writes it: the call is a trigger."""


class Change(Protocol):
    """One way to put new weights into a server that is paused.

    Attributes:
        name: what reports call it.
        in_session: it must be sent between `begin` and `end`, where the server has these.
        shows: afterwards the server cannot hold what it held before.
        trial: a directory to load if nothing shows, to see whether the server loads at all; None: nothing
            needs to be seen.
        has_begun: weights may have been written.
    """

    name: str
    in_session: bool
    shows: bool
    trial: Path | None
    has_begun: bool

    def send(self, control: SglangHttp, timeout_s: float) -> None:
        """Put them in.

        Raises:
            SynclineError: it failed; `undo` tells what that means.
        """

    def check(self) -> None:
        """Check that what the server read was what it was to read, once it has read for the last time.

        Raises:
            VerifyError: it may have been something else.
        """

    def undo(self, control: SglangHttp, timeout_s: float) -> None:
        """Put the old weights back; nothing to do if `send` had not begun to write.

        Raises:
            TornUpdateError: this way cannot, or it failed.
        """


class StrangeWeightsError(TornUpdateError):
    """What the server holds is not the version that it names, whoever wrote it; there is nothing to take back."""


class InPlace:
    """Changes that every rank writes into its own parameters, in O(changes).

    Args:
        directory: the staging directory.
        checkpoint: with every tensor as it is after the changes.
        journals: the changes, in the staging directory.
        prints: see `staged.Order`.
        ranks: how many there are.
        hooked: the server's load from disk is hooked by `plugin`, and is what makes the ranks look; else its
            custom weight loader is.

    Attributes:
        written: units that the ranks wrote in place; dense: tensors that were loaded whole, and why.
    """

    name = "in place"
    shows = False  # every rank has read back what it wrote
    trial: Path | None = None

    def __init__(
        self,
        directory: Path,
        checkpoint: Path,
        journals: Sequence[PartEntry],
        prints: Mapping[str, tuple[Fingerprint, Fingerprint]],
        ranks: int,
        *,
        hooked: bool = False,
    ) -> None:
        self.in_session = not hooked
        self._directory = directory
        self._checkpoint = checkpoint
        self._journals = tuple(journals)
        self._prints = prints
        self._ranks = ranks
        self.has_begun = False
        self.written = 0
        self.dense: dict[str, str] = {}

    def send(self, control: SglangHttp, timeout_s: float) -> None:
        """Let all ranks check, and only if all of them can, write; see `Change.send`."""
        answers = self._order("check", control, timeout_s)
        for answer in answers:
            self.dense.update(answer.dense if answer.dense is not None else {})
        check_held(answers)
        self.has_begun = True
        self.written = sum(answer.written for answer in self._order("apply", control, timeout_s))

    def check(self) -> None:
        """See `Change.check`: the ranks have checked what they read."""

    def undo(self, control: SglangHttp, timeout_s: float) -> None:
        """Let all ranks put back what they wrote; see `Change.undo`."""
        if not self.has_begun:
            return
        try:
            self._order("undo", control, timeout_s)
        except CommitError as error:
            raise TornUpdateError(str(error)) from error

    def _order(self, act: Act, control: SglangHttp, timeout_s: float) -> list[Answer]:
        order = Order(uuid.uuid4().hex, act, str(self._checkpoint), self._journals, self._prints)
        staged.forget_answers(self._directory)
        staged.write_order(self._directory, order)
        self._trigger(order.identity, control, timeout_s)
        answers = staged.read_answers(self._directory, order.identity, self._ranks)
        faults = [
            f"rank {answer.rank} of {self._ranks}: {answer.error}"
            for answer in answers
            if answer.error is not None
        ]
        if any(answer.is_strange for answer in answers):
            raise StrangeWeightsError(
                f"{act}: {'; '.join(faults)}; the server stays paused until all of it has been loaded"
            )
        if faults:
            raise CommitError(f"{act}: {'; '.join(faults)}")
        return answers

    def _trigger(self, order: str, control: SglangHttp, timeout_s: float) -> None:
        if self.in_session:
            control.load_tensors([NOTHING] * self._ranks, LOADER, timeout_s)
            return
        try:
            control.load_directory(str(self._directory), timeout_s)
        except EndpointError:
            # A rank that could not obey answers so; what each of them says is more.
            if not staged.has_answers(self._directory):
                raise
        # The first rank answers the call, whatever the others still do.
        staged.wait_answers(self._directory, order, self._ranks, timeout_s)


class FromDirectory:
    """Tensors that SGLang loads from a checkpoint directory, whole.

    Args:
        new: directory with them as they are to be.
        old: directory with the same ones as they were; None: nobody knows how they were.
        shows, trial: see `Change`.
    """

    name = "from disk"
    in_session = False

    def __init__(
        self, new: Loadable, old: Loadable | None, *, shows: bool, trial: Path | None = None
    ) -> None:
        self._new = new
        self._old = old
        self.shows = shows
        self.trial = trial
        self.has_begun = False

    def send(self, control: SglangHttp, timeout_s: float) -> None:
        """Load the new ones; see `Change.send`."""
        self.has_begun = True
        control.load_directory(str(self._new.path), timeout_s)
        self._new.look()

    def check(self) -> None:
        """Read the directory once more; see `Change.check`."""
        self._new.check()

    def undo(self, control: SglangHttp, timeout_s: float) -> None:
        """Load the old ones; see `Change.undo`."""
        if not self.has_begun:
            return
        if self._old is None:
            raise TornUpdateError(
                "all weights were being loaded, and what stood there is not known"
            )
        control.load_directory(str(self._old.path), timeout_s)
        self._old.check()


def check_held(answers: Sequence[Answer]) -> None:
    """Check that the ranks hold every element of every changed tensor, together.

    Raises:
        LayoutError: SGLang drops a tensor or a part of it, which it would answer with 200; or ranks cut it
            in ways that do not fit each other.
    """
    names = {
        name for answer in answers for name in (answer.held if answer.held is not None else {})
    }
    # Of what a rank loads whole it is not known which part it holds.
    whole = {
        name for answer in answers for name in (answer.dense if answer.dense is not None else {})
    }
    for name in sorted(names - whole):
        found = [
            answer.held[name]
            for answer in answers
            if answer.held is not None and name in answer.held
        ]
        grids = {grid for grid, boxes in found if boxes}
        boxes = sorted({box for _, boxes in found for box in boxes})
        if len(grids) > 1 or any(
            overlap(one, other) is not None
            for at, one in enumerate(boxes)
            for other in boxes[at + 1 :]
        ):
            raise LayoutError(
                f"tensor {name!r}: the ranks cut it in ways that do not fit each other; nothing was written; "
                "use the route from disk",
                tensor=name,
            )
        held = sum(prod(shape) for _, shape in boxes)
        if not grids or held != prod(next(iter(grids))):
            raise LayoutError(
                f"tensor {name!r} has changed, but SGLang's loader drops "
                f"{'it' if not boxes else 'a part of it'}: the server would answer 200 and serve old "
                "weights; nothing was written",
                tensor=name,
            )
