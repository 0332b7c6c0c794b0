"""Writing a whole version as an ordinary Hugging Face checkpoint into a directory of our own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from syncline import durable
from syncline.abc import Observe
from syncline.engines.checkpoint_files import failing
from syncline.engines.incoming import Tensors, each_once
from syncline.format import checkpoint, names, part, strict_json
from syncline.format.checkpoint import Place
from syncline.types import Step, TensorMeta
from syncline.version import HeldVersion

STEPS = ("create.written", "create.flushed")

SHARD_BYTES = 5_000_000_000
"""Largest weight file, unless one tensor alone is larger; what Hugging Face tools use too."""


def write_checkpoint(
    directory: Path,
    held: HeldVersion,
    tensors: Tensors,
    files: Mapping[str, bytes],
    *,
    shard_bytes: int,
    observe: Observe,
) -> None:
    """Fill a directory with weights, index and files, and flush all of it.

    Args:
        directory: exists, is ours, and has none of these files yet.
        held: its manifest says which tensors come.
        tensors: all of them, in any order, with their spans.
        files: the checkpoint's other files by name.
        shard_bytes: largest weight file, unless one tensor alone is larger.
        observe: told of the steps in `STEPS`.

    Raises:
        LayoutError: the tensors are not those of the manifest.
        FormatError: a file's name could leave the directory.
        CommitError: the system refuses.
        Whatever the iterators raise.
    """
    for name in files:
        names.check_file(name, "the name of a checkpoint's file")
    places = _lay_out(directory, held, shard_bytes)
    total_bytes, done_bytes = held.manifest.model_bytes, 0
    with _opened({place.path for place in places.values()}) as opened:
        for meta, spans in each_once(held, tensors):
            place = places[meta.name]
            for span in spans:
                at = place.start + span.start * meta.unit_bytes
                with failing(f"write {place.path}"):
                    raw = np.ascontiguousarray(span.bits).view(np.uint8)
                    durable.write_at(opened[place.path], raw.data, at)
            done_bytes += meta.nbytes
            observe(Step("create.written", done_bytes, total_bytes))
        for path, fd in opened.items():
            with failing(f"flush {path}"):
                os.fsync(fd)
    with failing(f"write to {directory}"):
        for name, content in files.items():
            durable.create(directory / name, content)
        durable.sync_directory(directory)
    observe(Step("create.flushed", total_bytes, total_bytes))


def _lay_out(directory: Path, held: HeldVersion, shard_bytes: int) -> dict[str, Place]:
    """Write headers and index, make room for the data, and return where every tensor goes."""
    groups = list(_groups(held, shard_bytes))
    places: dict[str, Place] = {}
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = checkpoint.SINGLE
        if len(groups) > 1:
            name = f"model-{number:05d}-of-{len(groups):05d}{names.PART_SUFFIX}"
        path = directory / name
        header = bytes(next(part.encode(group, _no_data, {"format": "pt"})))
        with failing(f"write {path}"):
            durable.create(path, header)
            os.truncate(path, len(header) + sum(meta.nbytes for meta in group))
        places |= checkpoint.read_places(path)
        weight_map |= {meta.name: name for meta in group}
    if len(groups) > 1:
        index = {"metadata": {"total_size": held.manifest.model_bytes}, "weight_map": weight_map}
        with failing(f"write {directory / names.INDEX}"):
            durable.create(directory / names.INDEX, strict_json.dump(index))
    return places


def _groups(held: HeldVersion, shard_bytes: int) -> Iterator[list[TensorMeta]]:
    """Yield the tensors in order of name, in groups of at most `shard_bytes`; at least one group."""
    group: list[TensorMeta] = []
    group_bytes = 0
    for entry in held.manifest.tensors:
        if group and group_bytes + entry.meta.nbytes > shard_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(entry.meta)
        group_bytes += entry.meta.nbytes
    yield group


def _no_data(_: str) -> tuple[bytes, ...]:
    return ()


@contextmanager
def _opened(paths: Iterable[Path]) -> Iterator[dict[Path, int]]:
    with ExitStack() as stack:
        opened = {}
        for path in sorted(paths):
            with failing(f"open {path}"):
                opened[path] = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
            stack.callback(os.close, opened[path])
        yield opened
