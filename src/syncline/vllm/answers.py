"""What the workers of one vLLM answer, believed as far as it is whole and says one thing."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import CommitError, ConfigError, FormatError, TornUpdateError
from syncline.vllm.control import Answers

UNNAMED = "default"
"""What vLLM calls the weights that it was started with."""


def check_engines(count: int) -> None:
    """Check that the answers are those of everything that generates.

    Raises:
        ConfigError: more engines generate than the one whose workers answer.
    """
    if count != 1:
        raise ConfigError(
            f"expected one engine behind this vLLM, found {count} (--data-parallel-size), of which only the first "
            "answers what it holds; nothing was touched; start one vLLM for each copy, and a follower for each"
        )


def staged_by(statuses: Answers, version: int, sha256: str | None) -> str:
    """Return the digest of the version that all workers have staged.

    Raises:
        CommitError: it is not the same on all, or not the one that is meant; nothing was changed.
    """
    staged = {(status.get("staged"), status.get("staged_sha256")) for status in statuses}
    number, found = next(iter(staged))
    if len(staged) > 1 or number != version or not isinstance(found, str):
        raise CommitError(
            f"expected all workers to have staged version {version}, found {sorted(map(str, staged))}; does "
            "something else drive this vLLM?"
        )
    if sha256 not in (None, found):
        raise CommitError(
            f"version {version} has the digest {sha256}, and {found} in the store as the workers see it: that is "
            "another run; give the follower and the workers the same one",
            version=version,
        )
    return found


def check_held(answers: Answers, digests: Sequence[object]) -> None:
    """Check that every worker holds the version that it should, and has nothing half done.

    Raises:
        CommitError: one does not: something else drives this vLLM.
    """
    for answer, expected in zip(answers, digests, strict=True):
        if answer.get("sha256") != expected or answer.get("is_applied"):
            raise CommitError(
                f"worker {answer.get('rank')}: expected to hold the version with digest {expected}, found "
                f"{answer.get('sha256')}; does something else drive this vLLM?"
            )


def name_of(answers: Answers, label: str) -> str:
    """Return the name that goes with what the workers hold, whatever vLLM calls it now.

    Args:
        label: vLLM's name, kept where no worker has held a version, unless it is a number as ours are.
    """
    version = answers[0].get("version")
    if version is not None:
        return str(version)
    return UNNAMED if label.isdecimal() else label


def is_one(answers: Answers) -> bool:
    """Tell whether all workers hold the same version, or none yet, and none of them a mix of two."""
    first = answers[0].get("sha256")
    return all(answer.get("sha256") == first and not answer.get("is_torn") for answer in answers)


def check_not_torn(answers: Answers) -> None:
    """Check that the workers do not hold a mix of two versions, neither one of them nor together.

    Raises:
        TornUpdateError: they do.
    """
    if not is_one(answers):
        raise TornUpdateError(
            "the engine holds a mix of two versions from an earlier update; it stays paused until a full version "
            "has been applied"
        )


def whole(answers: Answers) -> Answers:
    """Return the answers if they are those of all workers, in order.

    Raises:
        FormatError: one is missing, or is no answer of a worker of Syncline's.
    """
    found = [(answer.get("rank"), answer.get("workers")) for answer in answers]
    if not found or found != [(rank, len(found)) for rank in range(len(found))]:
        raise FormatError(
            f"expected an answer of each worker, by rank, found {len(found)}: {answers!r:.300}"
        )
    return answers


def checked(step: str, answers: Answers, member: str = "error") -> Answers:
    """Return the answers of all workers if none of them is an error.

    Raises:
        TornUpdateError, CommitError: with the first worker's words, and how many failed.
        FormatError: an answer is missing.
    """
    faults = [str(answer[member]) for answer in answers if answer.get(member) is not None]
    if not faults:
        return whole(answers)
    more = "" if len(faults) == 1 else f" ({len(faults)} of {len(answers)} workers say so)"
    kind = TornUpdateError if any(answer.get("is_torn") for answer in answers) else CommitError
    raise kind(f"{step}: {faults[0]}{more}")
