"""What a server lacks, and how it is put in: chosen by route, staged and proved while the server generates."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from syncline.engines.checkpoint_files import CheckpointFiles
from syncline.errors import CommitError, ConfigError, LayoutError, SynclineError
from syncline.sglang import partial, staged
from syncline.sglang.answers import Server
from syncline.sglang.broadcast import FromBroadcast, Group
from syncline.sglang.buckets import FromMemory, Tensors, cut
from syncline.sglang.change import LOADER, Change, FromDirectory, InPlace
from syncline.sglang.groups import with_partners
from syncline.sglang.mirror import Mirror
from syncline.sglang.proved import Prints, Proved, prints
from syncline.sync.checks import check_layout
from syncline.types import Bits, TensorMeta
from syncline.version import HeldVersion, PartEntry

Route = Literal["auto", "in_place", "plugin", "disk", "memory", "distributed", "nccl"]
ROUTES = get_args(Route)

_log = logging.getLogger(__name__)
_FLOATS = ("BF16", "F16", "F32")
_TRIAL_BYTES = 16 << 20
_NEW, _OLD, _TRIAL = _DIRECTORIES = ("new", "old", "trial")


@dataclass(frozen=True, slots=True)
class Lack:
    """What one server lacks of a version.

    Attributes:
        about: the server.
        staging: directory that its ranks see, too.
        before: what it holds; None: that is not known.
        target: what the checkpoint holds, and the server is to hold.
        pending: the changes that lead there; None: everything is to be loaded.
    """

    about: Server
    staging: Path
    before: HeldVersion | None
    target: HeldVersion
    pending: Sequence[PartEntry] | None


def change_of(lack: Lack, mirror: Mirror, route: Route, joined: Callable[[], Group]) -> Change:
    """Choose how to put in what a server lacks, and stage it; nothing is sent.

    Args:
        joined: returns a group with the server's ranks, for `distributed` and `nccl`.

    Raises:
        ConfigError: the server cannot take this route.
        VerifyError: the checkpoint does not hold the version's bits, or the changes do not lead to them.
        LayoutError: the server was loaded with other tensors.
        CommitError: the system refuses.
    """
    if lack.pending is None or lack.before is None:
        _check_names(lack, mirror)
        proved = Proved(mirror.path, prints(lack.target))
        return FromDirectory(proved, None, shows=False, trial=_trial(lack.staging, mirror))
    about, has_loader = lack.about, LOADER in lack.about.loaders
    if route == "in_place" and not has_loader:
        raise ConfigError(
            f"route 'in_place': expected the server to have --custom-weight-loader {LOADER}, found "
            f"{list(about.loaders)}; start it with that, or use the route 'disk'"
        )
    if route == "plugin" or (has_loader and route in ("auto", "in_place")):
        old, new = prints(lack.before), prints(lack.target)
        return InPlace(
            lack.staging,
            mirror.path,
            lack.pending,
            {
                name: (old[name], new[name])
                for name in with_partners(mirror.changed, mirror.tensors())
            },
            about.tensor_ranks,
            hooked=route == "plugin",
        )
    _check_names(lack, mirror)
    return _whole(lack, lack.before, mirror, route, joined)


def _whole(
    lack: Lack, before: HeldVersion, mirror: Mirror, route: Route, joined: Callable[[], Group]
) -> Change:
    """Stage the tensors that have changed, whole, as they are to be and as they were."""
    metas = mirror.tensors()
    names = with_partners(mirror.changed, metas)
    old, new = prints(before), prints(lack.target)
    shows = any(old[name] != new[name] for name in names)
    if route in ("memory", "distributed", "nccl"):
        buckets = cut(mirror.changed, metas)
        tensors = (Tensors(mirror.view, new), Tensors(mirror.before, old))
        if route == "memory":
            return FromMemory(buckets, *tensors, lack.about.tensor_ranks, shows=shows)
        joined()  # what is wrong with the group is found out while the server generates
        return FromBroadcast(joined, buckets, *tensors, shows=shows)

    def written(directory: str, bits: Callable[[str], Bits], wanted: Prints) -> Proved:
        path = lack.staging / directory
        partial.write(path, metas, names, bits, mirror.path)
        return Proved(path, {name: wanted[name] for name in names})

    return FromDirectory(
        written(_NEW, mirror.view, new), written(_OLD, mirror.before, old), shows=shows
    )


def tidy(staging: Path) -> None:
    """Remove what was staged for one update: it is over, and a server that comes to it late finds nothing."""
    try:
        staged.forget_order(staging)
    except CommitError as error:
        _log.warning("syncline: %s", error)
    for name in _DIRECTORIES:
        shutil.rmtree(staging / name, ignore_errors=True)


def _trial(staging: Path, mirror: Mirror) -> Path | None:
    """Stage a few tensors that no version has: what a server that loads at all must show.

    The smallest ones of floating point, the lowest bit of each element turned; None where there are none.
    """
    metas, left_bytes, names = mirror.tensors(), _TRIAL_BYTES, list[str]()
    for meta in sorted(_floats(metas), key=lambda meta: meta.nbytes):
        left_bytes -= meta.nbytes
        if left_bytes < 0 and names:
            break
        names.append(meta.name)
    if not names:
        return None
    path = staging / _TRIAL
    partial.write(
        path, metas, with_partners(names, metas), lambda name: mirror.view(name) ^ 1, mirror.path
    )
    return path


def _floats(metas: Mapping[str, TensorMeta]) -> Iterable[TensorMeta]:
    return (meta for meta in metas.values() if meta.dtype in _FLOATS and meta.nbytes)


def _check_names(lack: Lack, mirror: Mirror) -> None:
    """Check that what the server was loaded from has the tensors that it is about to be given.

    Raises:
        LayoutError: it has others, or its directory cannot be seen from here.
    """
    loaded = Path(lack.about.model_path)
    try:
        if loaded.resolve() == mirror.path.resolve() or lack.staging in (loaded, *loaded.parents):
            return
        found = CheckpointFiles(loaded).metas()
    # A path that is none is a ValueError, one that leads in a circle a RuntimeError.
    except (SynclineError, OSError, ValueError, RuntimeError) as error:
        if loaded.name in _DIRECTORIES and not loaded.exists():
            raise LayoutError(
                f"the server was last loaded from {loaded}, by a follower with the staging directory {loaded.parent}: "
                f"found {lack.staging}, so it is not known whether its tensors are those of {mirror.path}; "
                f"follow it with --staging {loaded.parent}, or start the server anew from the checkpoint"
            ) from error
        raise LayoutError(
            f"the server was loaded from {loaded}, which cannot be read here ({error}), so it is not known "
            f"whether its tensors are those of {mirror.path}; start it from that directory"
        ) from error
    check_layout(found, lack.target.manifest)
