"""What a follower and the ranks of a server tell each other: files in one directory that both see.

    order.json                 what every rank is to do now
    journal-<n>                changes in checkpoint coordinates, sealed; named by the order with their digests
    answer-<order>-<rank>.json how it went on one rank

The HTTP call that makes the ranks look is a bare trigger: SGLang drops what a loader returns, and dies of
what it raises.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from syncline.errors import CommitError, FormatError
from syncline.format import strict_json
from syncline.types import Fingerprint
from syncline.version import PartEntry

Act = Literal["check", "apply", "undo"]
Box = tuple[tuple[int, ...], tuple[int, ...]]

ORDER = "order.json"
_LIMIT_BYTES = 64 << 20
_LOOK_S = 0.005
_FINGERPRINT = re.compile("[0-9a-f]{32}")
_ACTS = ("check", "apply", "undo")


@dataclass(frozen=True, slots=True)
class Order:
    """What every rank is to do.

    Attributes:
        identity: hexadecimal, never used twice.
        act: `check` that the changes fit, and write nothing; `apply` them; `undo` them.
        checkpoint: directory with every tensor as it is after the changes.
        journals: the changes, in order: name inside the staging directory, size, digest.
        prints: of every changed tensor, and of those that are loaded with it: fingerprint before the changes,
            and after them.
    """

    identity: str
    act: Act
    checkpoint: str
    journals: tuple[PartEntry, ...]
    prints: Mapping[str, tuple[Fingerprint, Fingerprint]]


@dataclass(frozen=True, slots=True)
class Answer:
    """How an order went on one rank.

    Attributes:
        order: its identity.
        rank: who answers.
        error: what went wrong; None if nothing did.
        is_torn: undoing it failed too.
        is_strange: the rank's weights are not those that the changes were made for.
        written: units that were written in place.
        dense: by name of a changed tensor that is loaded whole: why.
        held: by name of a changed tensor: a grid of it, and the boxes that this rank holds; none of a
            tensor that it drops.
    """

    order: str
    rank: int
    error: str | None = None
    is_torn: bool = False
    written: int = 0
    dense: Mapping[str, str] | None = None
    held: Mapping[str, tuple[tuple[int, ...], tuple[Box, ...]]] | None = None
    is_strange: bool = False


def write_order(directory: Path, order: Order) -> None:
    """Put an order where the ranks look; it is whole or not there."""
    document = {
        "identity": order.identity,
        "act": order.act,
        "checkpoint": order.checkpoint,
        "journals": [[part.path, part.size_bytes, part.sha256] for part in order.journals],
        "prints": {
            name: [before.hex(), after.hex()] for name, (before, after) in order.prints.items()
        },
    }
    _replace(directory / ORDER, strict_json.dump(document))


def read_order(directory: Path) -> Order:
    """Read the current order.

    Raises:
        FormatError: it is not one.
        CommitError: there is none.
    """
    where = str(directory / ORDER)
    found = _read(directory / ORDER)
    journals = []
    for one in strict_json.items(found.get("journals"), where):
        path, size_bytes, sha256 = _some(3, one, where)
        if not isinstance(path, str) or "/" in path or not isinstance(sha256, str):
            raise FormatError(f"{where}: found a journal {one!r:.200}")
        journals.append(PartEntry(path, strict_json.integer(size_bytes, where), sha256))
    act = found.get("act")
    if act not in _ACTS:
        raise FormatError(f"{where}: act: expected one of {', '.join(_ACTS)}, found {act!r:.80}")
    return Order(
        str(found.get("identity")),
        cast("Act", act),
        str(found.get("checkpoint")),
        tuple(journals),
        {
            name: _prints(pair, where)
            for name, pair in strict_json.members(found.get("prints"), where).items()
        },
    )


def write_answer(directory: Path, answer: Answer) -> None:
    """Put an answer where the follower looks."""
    held = answer.held if answer.held is not None else {}
    document = {
        "order": answer.order,
        "rank": answer.rank,
        "error": answer.error,
        "is_torn": answer.is_torn,
        "is_strange": answer.is_strange,
        "written": answer.written,
        "dense": dict(answer.dense) if answer.dense is not None else {},
        "held": {
            name: [list(grid), [[list(start), list(shape)] for start, shape in boxes]]
            for name, (grid, boxes) in held.items()
        },
    }
    _replace(_answer(directory, answer.order, answer.rank), strict_json.dump(document))


def read_answers(directory: Path, order: str, ranks: int) -> list[Answer]:
    """Read how an order went on each rank.

    Raises:
        CommitError: a rank gave no answer.
        FormatError: an answer is not one.
    """
    return [_answered(_answer(directory, order, rank)) for rank in range(ranks)]


def wait_answers(directory: Path, order: str, ranks: int, timeout_s: float) -> None:
    """Return when every rank has answered an order, or time is up."""
    until_s = time.monotonic() + timeout_s
    paths = [_answer(directory, order, rank) for rank in range(ranks)]
    while not all(path.exists() for path in paths) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)


def forget_answers(directory: Path) -> None:
    """Remove the answers of earlier orders.

    Raises:
        CommitError: the system refuses.
    """
    try:
        for path in directory.glob("answer-*.json"):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CommitError(f"{path} cannot be removed: {error.strerror}") from error


def forget_order(directory: Path) -> None:
    """Remove the order and its answers: a rank that comes to it late does nothing.

    Raises:
        CommitError: the system refuses.
    """
    try:
        (directory / ORDER).unlink(missing_ok=True)
    except OSError as error:
        raise CommitError(f"{directory / ORDER} cannot be removed: {error.strerror}") from error
    forget_answers(directory)


def has_answers(directory: Path) -> bool:
    """Tell whether some rank has answered since `forget_answers`."""
    return any(directory.glob("answer-*.json"))


def _answered(path: Path) -> Answer:
    where = str(path)
    found = _read(path)
    held = {}
    for name, value in strict_json.members(found.get("held"), where).items():
        grid, boxes = _some(2, value, where)
        held[name] = (_sides(grid, where), tuple(_box(box, where) for box in _list(boxes, where)))
    error = found.get("error")
    return Answer(
        str(found.get("order")),
        strict_json.integer(found.get("rank"), where),
        None if error is None else str(error),
        found.get("is_torn") is not False,
        strict_json.integer(found.get("written"), where),
        {k: str(v) for k, v in strict_json.members(found.get("dense"), where).items()},
        held,
        found.get("is_strange") is not False,
    )


def _prints(value: object, where: str) -> tuple[Fingerprint, Fingerprint]:
    before, after = (_print(one, where) for one in _some(2, value, where))
    return before, after


def _print(value: object, where: str) -> Fingerprint:
    if not isinstance(value, str) or _FINGERPRINT.fullmatch(value) is None:
        raise FormatError(f"{where}: expected a fingerprint, found {value!r:.80}")
    return Fingerprint.from_hex(value)


def _box(value: object, where: str) -> Box:
    start, shape = _some(2, value, where)
    return _sides(start, where), _sides(shape, where)


def _sides(value: object, where: str) -> tuple[int, ...]:
    return tuple(strict_json.integer(side, where) for side in _list(value, where))


def _some(count: int, value: object, where: str) -> Sequence[object]:
    found = strict_json.items(value, where)
    if len(found) != count:
        raise FormatError(f"{where}: expected a list of {count}, found {found!r:.200}")
    return found


def _list(value: object, where: str) -> Sequence[object]:
    return strict_json.items(value, where)


def _answer(directory: Path, order: str, rank: int) -> Path:
    return directory / f"answer-{order}-{rank}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CommitError(
            f"{path}: expected a file, found none ({error.strerror}); give the follower and the SGLang server "
            "the same staging directory, and start the server with --custom-weight-loader "
            "syncline.sglang.worker.load"
        ) from error
    return strict_json.members(
        strict_json.parse(raw, str(path), limit_bytes=_LIMIT_BYTES), str(path)
    )


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(path.name + ".new")
    try:  # not flushed: whoever reads it does not outlive this machine either
        new.write_bytes(data)
        new.replace(path)
    except OSError as error:
        raise CommitError(f"{path} cannot be written: {error.strerror}") from error
