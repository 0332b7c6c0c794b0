"""Weights in a checkpoint on disk: a safetensors file, or a Hugging Face checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path

from syncline.abc import WeightSource
from syncline.errors import ConfigError, LayoutError, StoreError
from syncline.format import checkpoint, companions, state
from syncline.types import Bits, TensorMeta


class CheckpointSource(WeightSource):
    """The weights of a checkpoint, mapped into memory and never copied.

    Args:
        path: a safetensors file, or a directory with one or with several and an index.

    Raises:
        ConfigError: there is no checkpoint.
        FormatError: a header or the index is illegal, or they disagree; says file and field.
        StoreError: the system refuses to read, or Syncline is changing the directory just now.

    Cost: the headers are read at once, the weights when their bits are.
    """

    is_stable = True

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._state = state.read(self.path)
        if self._state is not None and self._state.is_changing:
            raise StoreError(
                f"{self.path} is being changed, or a process died while changing it: its weights are a "
                "mix; wait, or open it with CheckpointDir (syncline pull) to finish the change"
            )
        self._places = checkpoint.locate(self.path)
        self._mapped = checkpoint.MappedFiles()

    def metas(self) -> Mapping[str, TensorMeta]:
        """Return what every tensor is, by name."""
        return {name: place.meta for name, place in self._places.items()}

    def bits(self, name: str) -> Bits:
        """Return the bits of one tensor. Aliasing: a read-only view of the mapped file.

        Raises:
            LayoutError: the checkpoint has no such tensor.
        """
        place = self._places.get(name)
        if place is None:
            raise LayoutError(f"{self.path} has no tensor {name!r}", tensor=name)
        return self._mapped.bits(place)

    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        """Yield each tensor once, in the order in which they lie on disk; see `WeightSource`.

        Raises:
            StoreError: after the last tensor, if Syncline has changed the directory meanwhile.
        """
        for place in self._places.values():
            yield place.meta, self._mapped.bits(place)
        if state.read(self.path) != self._state:
            raise StoreError(f"{self.path} was changed while it was read; read it again")

    def files(self) -> Mapping[str, bytes]:
        """Return the small files that belong to the checkpoint: configuration, tokenizer, licence.

        These are the directory's own `*.json` (without indexes), `*.txt`, `*.model`, `*.jinja`,
        `*.tiktoken`, `*.md`, `LICENSE*` and `NOTICE*`. Never code, weights, pickles or hidden files. A
        symbolic link counts if it stays in the directory, or in the `blobs` of a Hugging Face cache.

        Raises:
            ConfigError: such a file is a link out of the checkpoint, a pickle, or over 128 MiB.
            StoreError: the system refuses to read.
        """
        if not self.path.is_dir():
            return {}
        found = sorted(path for path in self.path.iterdir() if companions.belongs(path.name))
        return {path.name: _content(path, _roots(self.path)) for path in found if not path.is_dir()}


def _roots(directory: Path) -> tuple[Path, ...]:
    """Return the directories that a checkpoint's files may really lie in."""
    real = directory.resolve()
    if real.parent.name == "snapshots":
        return (real, real.parent.parent / "blobs")
    return (real,)


def _content(path: Path, roots: tuple[Path, ...]) -> bytes:
    real = path.resolve()
    if real.parent not in roots:
        raise ConfigError(
            f"{path} is a symbolic link to {real}, outside the checkpoint; it would be published; "
            "replace the link by a copy, or remove it"
        )
    try:
        with path.open("rb") as file:
            content = file.read(companions.MAX_FILE_BYTES + 1)
    except OSError as error:
        raise StoreError(f"read {path}: {error.strerror}") from error
    if len(content) > companions.MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} is over {companions.MAX_FILE_BYTES} bytes, too large for a file beside the "
            "weights; move it out of the checkpoint"
        )
    companions.check(content, str(path))
    return content
