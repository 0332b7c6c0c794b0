"""Checkpoint directories that hold some tensors only: what SGLang loads when a part has changed.

They are built and flushed before the server hears of them: it never reads one that is still being written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from syncline import durable
from syncline.errors import CommitError
from syncline.types import Bits, TensorMeta

WEIGHTS = "model.safetensors"


def write(
    directory: Path,
    metas: Mapping[str, TensorMeta],
    names: Iterable[str],
    bits: Callable[[str], Bits],
    like: Path,
) -> None:
    """Make a directory with these tensors, and the other files of the checkpoint `like`.

    Args:
        bits: returns a tensor's bits; asked once for each name.
        like: a checkpoint of the same model, whose configuration and tokenizer are copied.

    Raises:
        CommitError: the system refuses.

    Cost: the bytes of the tensors. Memory: one of them.
    """
    shutil.rmtree(directory, ignore_errors=True)
    listed = sorted(names)
    try:
        directory.mkdir(parents=True)
        for path in sorted(like.iterdir()):
            if path.is_file() and not _is_weights(path.name):
                shutil.copyfile(path, directory / path.name)
        with (directory / WEIGHTS).open("wb") as file:
            file.write(_header([metas[name] for name in listed]))
            for name in listed:
                file.write(np.ascontiguousarray(bits(name)).view(np.uint8).data)
        durable.sync_file(directory / WEIGHTS)
        durable.sync_directory(directory)
    except OSError as error:
        raise CommitError(
            f"{directory} cannot be written: {error.strerror}; nothing was changed"
        ) from error


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt"))


def _header(metas: Iterable[TensorMeta]) -> bytes:
    """Return the header of a safetensors file, its length first."""
    members: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for meta in metas:
        members[meta.name] = {
            "dtype": meta.dtype,
            "shape": list(meta.shape),
            "data_offsets": [offset, offset + meta.nbytes],
        }
        offset += meta.nbytes
    text = json.dumps(members, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
