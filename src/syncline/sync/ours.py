"""What the system and other packages raise, where nobody nearer to it has said what it means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from syncline.errors import CommitError, SynclineError


@contextmanager
def as_commit_error(what: str) -> Iterator[None]:
    """Turn an error of the system, of memory that ran out, or of torch into a `CommitError` with its words in it.

    Args:
        what: was being done, and what holds now.

    Example:
        >>> with as_commit_error("the shelf was being filled"):
        ...     raise FileNotFoundError(2, "No such file or directory", "shelf")
        Traceback (most recent call last):
        syncline.errors.CommitError: the shelf was being filled: FileNotFoundError: [Errno 2] No such file or directory: 'shelf'
    """
    try:
        yield
    except SynclineError:
        raise  # some of them are OSErrors too
    except (OSError, MemoryError, RuntimeError) as error:
        words = " ".join(str(error).split())[:500]
        raise CommitError(f"{what}: {type(error).__name__}: {words}") from error
