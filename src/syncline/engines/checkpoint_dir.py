"""A Hugging Face checkpoint directory on disk that follows a run, version by version.

Two modes. `in_place` overwrites the changed elements in the files, which costs as much as changed; a loader
that reads meanwhile must ask `read_state` before and after. `swap` builds the next directory beside the
current one and flips a link, for loaders that open a path without asking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from syncline.abc import Engine, Observe, ignore
from syncline.engines import in_place, swap
from syncline.engines.checkpoint_files import CheckpointFiles
from syncline.engines.new_checkpoint import SHARD_BYTES
from syncline.errors import ConfigError, LayoutError
from syncline.format import state as state_format
from syncline.format.state import DirectoryState
from syncline.types import Bits, Record, Span, TensorMeta
from syncline.version import HeldVersion

STEPS = (*in_place.STEPS, *swap.STEPS)
"""What `observe` is told of. In place: `create.*`, then `apply.*`. With `swap`: the first two of `create.*`,
or `flip.copied` and `apply.record_written`, `.flushed` and `.verified`; then the rest of `flip.*`."""

Mode = Literal["in_place", "swap"]


def read_state(path: str | PathLike[str]) -> DirectoryState | None:
    """Return what a checkpoint directory says of itself; None if Syncline does not keep it.

    A loader that reads files while they may be overwritten is safe if it asks before and after: the two
    answers must be equal and `is_changing` False, or what it loaded may be a mix.

    Raises:
        FormatError: the state file is damaged.
        StoreError: the system refuses to read it.

    Cost: reads and checks one small file.
    """
    return state_format.read(Path(path))


class CheckpointDir(Engine):
    """An engine over a checkpoint directory; any Hugging Face tool can load it when it is whole.

    A path that is missing or empty is filled by `create`: `model.safetensors`, or numbered shards with an
    index, and the checkpoint's other files, built beside it and renamed. `.syncline` in it holds the state.
    What a killed process left is finished or removed when the directory is opened next.

    Args:
        path: the directory; in `swap` mode a link to it, which Syncline makes.
        mode: see the module's first lines.
        adopt: take over a checkpoint that Syncline did not make (`in_place` only). Its files must not be
            symbolic or hard links, as in a Hugging Face cache: those are shared.
        shard_bytes: largest weight file that `create` makes, unless one tensor is larger.
        observe: told of every step in `STEPS`, with the bytes done where that is known.

    Raises:
        ForeignDirectoryError: there is something that Syncline did not make; it is not touched.
        ConfigError: the directory is kept in the other mode.
        TornUpdateError: an update that a crash interrupted cannot be finished.
        CommitError: another process is changing it, or the system refuses.

    One process at a time may change it (flock); another gets `CommitError` at once. Whoever wrote in
    between makes `apply` raise `BaseVersionError`.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        mode: Mode = "in_place",
        adopt: bool = False,
        shard_bytes: int = SHARD_BYTES,
        observe: Observe | None = None,
    ) -> None:
        if shard_bytes < 1:
            raise ConfigError(f"shard_bytes must be at least 1, found {shard_bytes}")
        self._shard_bytes = shard_bytes
        self._keeper = _keeper(Path(path), mode, adopt, ignore if observe is None else observe)
        self._files: CheckpointFiles | None = None
        self._expected: HeldVersion | None = None
        self.held()

    @property
    def path(self) -> Path:
        """Where the checkpoint is."""
        return self._keeper.path

    def tensors(self) -> Mapping[str, TensorMeta]:
        """Return the tensors in the weight files; see `Engine.tensors`."""
        if self._keeper.current() is None:
            return MappingProxyType({})
        return MappingProxyType(self._opened().metas())

    def held(self) -> HeldVersion | None:
        """Return the committed version, after finishing what a crash interrupted; see `Engine.held`.

        Cost: reads the state file alone.
        """
        state = self._keeper.state()
        self._expected = None if state is None else state.held
        return self._expected

    def view(self, name: str) -> Bits:
        """Return the bits of a tensor; see `Engine.view`. Aliasing: a view of the mapped file."""
        return self._opened().view(name)

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Overwrite what the records list; see `Engine.apply`. The journal is on disk.

        Raises:
            BaseVersionError: another process has moved the directory on since `held` was called.
        """
        if self._keeper.current() is None:
            raise LayoutError(
                f"{self.path} holds no checkpoint yet; create one", version=held.version
            )
        self._keeper.apply(self._opened(), records, held, self._expected)
        self._expected = held

    def create(
        self,
        held: HeldVersion,
        spans: Iterable[tuple[TensorMeta, Iterable[Span]]],
        files: Mapping[str, bytes],
    ) -> None:
        """Fill the missing or empty path with a whole version; see `Engine.create`."""
        if self._keeper.current() is not None:
            raise LayoutError(
                f"{self.path} holds a checkpoint already; apply a version to it instead",
                version=held.version,
            )
        self._keeper.create(held, spans, files, self._shard_bytes)
        self._expected = held

    def _opened(self) -> CheckpointFiles:
        directory = self._keeper.current()
        if directory is None:
            raise LayoutError(f"{self.path} holds no checkpoint yet")
        if self._files is None or self._files.directory != directory:
            self._files = CheckpointFiles(directory)
        return self._files


def _keeper(path: Path, mode: Mode, adopt: bool, observe: Observe) -> in_place.InPlace | swap.Swap:
    resolved = path.parent.resolve() / path.name if path.name else path.resolve()
    if mode == "swap":
        if adopt:
            raise ConfigError(
                "adopt: swap mode cannot take a checkpoint over, since the path must become a link; "
                "adopt it in mode 'in_place', or pull into a new path"
            )
        return swap.Swap(resolved, observe=observe)
    if mode != "in_place":
        raise ConfigError(f"mode: expected 'in_place' or 'swap', found {mode!r}")
    resolved = resolved.resolve()
    if swap.made_by_swap(resolved):
        raise ConfigError(f"{path} was made in mode 'swap'; open it in that mode")
    return in_place.InPlace(resolved, is_adopted=adopt, observe=observe)
