"""Whole tensors in flat buckets, from the memory of this host: SGLang's `flattened_bucket`.

The server takes a tensor only as torch's pickler for processes writes it: a name of shared memory, its size,
and what a view of it is. So that pickler writes here, on what torch and the standard library define and the
server's own list allows; nothing is ever read with it, and no class of Syncline's is in it.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from syncline.errors import (
    LayoutError,
    PeerLostError,
    TransportTimeoutError,
    TransportUnavailableError,
    VerifyError,
)
from syncline.sglang.control import SglangHttp
from syncline.sglang.groups import partners
from syncline.sync.checks import fingerprint_all
from syncline.types import Bits, Fingerprint, TensorMeta, unsigned

BUCKET_BYTES = 256 << 20
FORMAT = "flattened_bucket"

_SHARED = Path("/dev/shm")  # noqa: S108 - where torch puts it
_NAMED = re.compile(r"</(torch_\w+)>")
_MORE_THAN_READERS = 1 << 10


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel as one stretch of bytes, widest elements first, so that each is aligned.

    Attributes:
        metas: in their order in the stretch.
    """

    metas: tuple[TensorMeta, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(meta.nbytes for meta in self.metas)


def cut(
    names: Sequence[str], metas: Mapping[str, TensorMeta], most_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Return buckets of at most `most_bytes`, larger where what belongs together is.

    Tensors that SGLang must see in one call are never in two; what is missing of them is added.

    Example:
        >>> metas = {n: TensorMeta(n, "BF16", (4,)) for n in ("b", "a.q_a_proj.w", "a.kv_a_proj_with_mqa.w")}
        >>> [[meta.name for meta in bucket.metas] for bucket in cut(["b", "a.q_a_proj.w"], metas, 1)]
        [['b'], ['a.q_a_proj.w', 'a.kv_a_proj_with_mqa.w']]
    """
    buckets: list[Bucket] = []
    seen: set[str] = set()
    group: list[TensorMeta] = []
    for name in names:
        if name in seen:
            continue
        together = [metas[one] for one in (name, *partners(name, metas))]
        seen.update(meta.name for meta in together)
        nbytes = sum(meta.nbytes for meta in together)
        if group and sum(meta.nbytes for meta in group) + nbytes > most_bytes:
            buckets.append(_bucket(group))
            group = []
        group += together
    return [*buckets, _bucket(group)] if group else buckets


def _bucket(group: Sequence[TensorMeta]) -> Bucket:
    for meta in group:
        if not meta.nbytes:
            raise LayoutError(
                f"tensor {meta.name!r} is empty, which SGLang's buckets cannot hold",
                tensor=meta.name,
            )
    return Bucket(tuple(sorted(group, key=lambda meta: -meta.unit_bytes)))


@dataclass(frozen=True, slots=True)
class Tensors:
    """Where tensors are taken from, and what they must be.

    Attributes:
        bits: returns a tensor's bits.
        prints: fingerprint of each.
    """

    bits: Callable[[str], Bits]
    prints: Mapping[str, Fingerprint]


def filled(bucket: Bucket, tensors: Tensors) -> Any:
    """Return a bucket's bytes as a torch tensor, proved where they lie now. Memory: the bucket.

    Raises:
        VerifyError: a tensor has another fingerprint.
        TransportUnavailableError: torch is missing.
    """
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise TransportUnavailableError(
            "whole tensors are handed to SGLang by torch, which is missing: pip install 'syncline[torch]'"
        ) from error
    flat = torch.empty(bucket.nbytes, dtype=torch.uint8)
    view, at = flat.numpy(), 0
    for meta in bucket.metas:
        view[at : at + meta.nbytes] = np.ascontiguousarray(tensors.bits(meta.name)).view(np.uint8)
        at += meta.nbytes
    check_filled(bucket, flat, tensors.prints)
    return flat


def check_filled(bucket: Bucket, flat: Any, prints: Mapping[str, Fingerprint]) -> None:
    """Check that a bucket's bytes are those of its tensors.

    Raises:
        VerifyError: they are not.
    """
    view, at = flat.numpy(), 0
    for meta in bucket.metas:
        bits = view[at : at + meta.nbytes].view(unsigned(meta.unit_bytes))
        if fingerprint_all(meta, bits) != prints[meta.name]:
            raise VerifyError(
                f"tensor {meta.name!r}: its bits are not those that are to be sent; somebody else writes to the "
                "checkpoint, or to the memory that is sent",
                tensor=meta.name,
            )
        at += meta.nbytes


class FromMemory:
    """Tensors that the server reads from shared memory of this host; see `change.Change`.

    Args:
        buckets: what to send.
        new: the tensors as they are to be; `old`: as they were.
        ranks: of the server.
        shows: see `change.Change`.
    """

    name = "from memory"
    in_session = True
    trial: Path | None = None

    def __init__(
        self, buckets: Sequence[Bucket], new: Tensors, old: Tensors, ranks: int, *, shows: bool
    ) -> None:
        self._buckets = buckets
        self._new = new
        self._old = old
        self._ranks = ranks
        self.shows = shows
        self.has_begun = False
        self._begun: list[Bucket] = []
        self._unanswered: list[Shared] = []

    def send(self, control: SglangHttp, timeout_s: float) -> None:
        """Send every bucket; see `Change.send`."""
        for bucket in self._buckets:
            self._send(bucket, self._new, control, timeout_s)

    def check(self) -> None:
        """See `Change.check`: every bucket was proved where it lay when it was sent."""

    def undo(self, control: SglangHttp, timeout_s: float) -> None:
        """Send every bucket as it was, of those that may have arrived; see `Change.undo`."""
        try:
            for bucket in tuple(self._begun):
                self._send(bucket, self._old, control, timeout_s)
        finally:
            for shared in self._unanswered:
                shared.close()

    def _send(
        self,
        bucket: Bucket,
        tensors: Tensors,
        control: SglangHttp,
        timeout_s: float,
    ) -> None:
        shared = Shared(filled(bucket, tensors))
        try:
            # One payload a rank: each takes the shared memory's count down by one.
            payloads = [_payload(bucket, shared.flat) for _ in range(self._ranks)]
            self.has_begun = True
            self._begun.append(bucket)
            control.load_tensors(payloads, FORMAT, timeout_s)
            check_filled(bucket, shared.flat, tensors.prints)  # the ranks could write there
        except (TransportTimeoutError, PeerLostError):
            self._unanswered.append(shared)  # a rank may still be about to read it
            raise
        except BaseException:
            shared.close()
            raise
        shared.close()


class Shared:
    """A tensor in shared memory that other processes can open by name, until `close`; what is open stays.

    Args:
        flat: a tensor of bytes, which moves there.

    Raises:
        TransportUnavailableError: there is no room.
    """

    def __init__(self, flat: Any) -> None:
        from torch import multiprocessing  # noqa: PLC0415

        self.flat = flat
        storage = flat.untyped_storage()
        _check_room(storage.nbytes())
        try:
            with _by_name(multiprocessing):
                _, name, _ = storage._share_filename_cpu_()
        except RuntimeError as error:
            for found in _NAMED.findall(str(error)):
                (_SHARED / found).unlink(missing_ok=True)
            raise _no_room(storage.nbytes(), str(error)) from error
        self._path = _SHARED / name.decode().removeprefix("/")
        # Each reader takes the count down by one, and whoever takes it to nothing removes the name, or ends its
        # process if it cannot. So it never gets there: the name is removed here.
        for _ in range(_MORE_THAN_READERS):
            storage._shared_incref()  # noqa: SLF001 - the same

    def close(self) -> None:
        """Remove the name; harmless when called again."""
        self._path.unlink(missing_ok=True)


def _check_room(nbytes: int) -> None:
    free = os.statvfs(_SHARED)
    free_bytes = free.f_bavail * free.f_frsize
    if free_bytes < nbytes:
        raise _no_room(nbytes, f"{free_bytes} are free")


def _no_room(nbytes: int, why: str) -> TransportUnavailableError:
    return TransportUnavailableError(
        f"route 'memory': expected room for {nbytes} bytes in {_SHARED}, found none ({why}); enlarge it, or use "
        "the route 'disk'"
    )


def _payload(bucket: Bucket, flat: Any) -> str:
    from multiprocessing.reduction import ForkingPickler  # noqa: PLC0415

    from torch import multiprocessing  # noqa: PLC0415 - registers torch's own reductions

    described, at = [], 0
    for meta in bucket.metas:
        described.append(
            SimpleNamespace(
                name=meta.name,
                shape=list(meta.shape),
                dtype=torch_dtype(meta),
                start_idx=at,
                end_idx=at + meta.nbytes,
                numel=meta.nbytes,  # SGLang counts bytes here
            )
        )
        at += meta.nbytes
    written = io.BytesIO()
    with _by_name(multiprocessing):
        ForkingPickler(written).dump({"flattened_tensor": flat, "metadata": described})
    return base64.b64encode(written.getvalue()).decode()


@contextmanager
def _by_name(multiprocessing: Any) -> Iterator[None]:
    """Let torch name shared memory: a process that is no child of ours cannot be handed a descriptor."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)


def torch_dtype(meta: TensorMeta) -> Any:
    """Return the dtype as torch has it."""
    import safetensors.torch  # noqa: PLC0415

    dtypes: Any = safetensors.torch._TYPES  # noqa: SLF001 - its table of its own names
    return dtypes[meta.dtype]
