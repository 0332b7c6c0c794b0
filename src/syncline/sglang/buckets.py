"""Whole tensors in flat buckets, from the memory of this host: SGLang's `flattened_bucket`.

The server takes a tensor only as torch's pickler for processes writes it: a name of shared memory, its size,
and what a view of it is. So that pickler writes here, on what torch and the standard library define and the
server's own list allows; nothing is ever read with it, and no class of Syncline's is in it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from syncline.errors import LayoutError, TornUpdateError, TransportUnavailableError
from syncline.sglang.control import SglangHttp
from syncline.sglang.groups import partners
from syncline.types import Bits, TensorMeta

BUCKET_BYTES = 256 << 20
FORMAT = "flattened_bucket"


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


def filled(bucket: Bucket, bits: Callable[[str], Bits]) -> Any:
    """Return a bucket's bytes as a torch tensor. Memory: the bucket.

    Raises:
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
        view[at : at + meta.nbytes] = np.ascontiguousarray(bits(meta.name)).view(np.uint8)
        at += meta.nbytes
    return flat


class FromMemory:
    """Tensors that the server reads from shared memory of this host; see `change.Change`.

    Args:
        buckets: what to send.
        new: returns a tensor's bits as they are to be.
        old: the same as they were; None: nobody knows.
        ranks: of the server.
    """

    name = "from memory"
    in_session = True

    def __init__(
        self,
        buckets: Sequence[Bucket],
        new: Callable[[str], Bits],
        old: Callable[[str], Bits] | None,
        ranks: int,
    ) -> None:
        self._buckets = buckets
        self._new = new
        self._old = old
        self._ranks = ranks
        self._begun: list[Bucket] = []

    def send(self, control: SglangHttp, timeout_s: float) -> None:
        """Send every bucket; see `Change.send`."""
        for bucket in self._buckets:
            payloads = self._payloads(bucket, self._new)
            self._begun.append(bucket)
            control.load_tensors(payloads, FORMAT, timeout_s)

    def undo(self, control: SglangHttp, timeout_s: float) -> None:
        """Send every bucket as it was, of those that may have arrived; see `Change.undo`."""
        if not self._begun:
            return
        if self._old is None:
            raise TornUpdateError("weights were being sent, and what stood there is not known")
        for bucket in self._begun:
            control.load_tensors(self._payloads(bucket, self._old), FORMAT, timeout_s)

    def _payloads(self, bucket: Bucket, bits: Callable[[str], Bits]) -> list[str]:
        flat = filled(bucket, bits)
        # One a rank: each takes the shared memory's count down by one.
        return [_payload(bucket, flat) for _ in range(self._ranks)]


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
