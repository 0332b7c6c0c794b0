"""Copies of files and directories that share what they can with the original."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_PIECE_BYTES = 1 << 26
_UNSUPPORTED = frozenset(
    {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EMLINK}
)


def copy_tree(source: Path, target: Path, *, leave_out: str) -> None:
    """Make a directory that holds the same files as another, as hard links; symbolic links stay links.

    Args:
        source: the original.
        target: must not exist.
        leave_out: name of an entry of `source` that is not copied.
    """

    def left_out(directory: str, names: list[str]) -> list[str]:
        return [leave_out] if Path(directory) == source and leave_out in names else []

    shutil.copytree(source, target, symlinks=True, ignore=left_out, copy_function=_link)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file so that writing to one leaves the other alone; by block clone where that exists.

    Args:
        source: the original.
        target: must not exist.
    """
    with source.open("rb") as original, target.open("xb") as copy:
        left_bytes = os.fstat(original.fileno()).st_size
        try:
            while copied := _copy_range(original.fileno(), copy.fileno(), _PIECE_BYTES):
                left_bytes -= copied
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        if left_bytes:
            shutil.copyfileobj(original, copy, _PIECE_BYTES)


def _copy_range(source: int, target: int, count: int) -> int:
    if not hasattr(os, "copy_file_range"):  # Linux alone has it
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return os.copy_file_range(source, target, count)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        copy_file(Path(source), Path(target))
    return target
