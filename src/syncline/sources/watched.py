"""The `hook` detector: weights that know what changed in them, because their writes are seen.

Before an operation writes a weight, its old bits are copied, and compared with the new ones afterwards, as
integers and a bucket at a time. Between steps nothing is kept but which units are dirty and what stood
there. How a user works with it: docs/how-to/detect-changes-in-the-optimizer.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import MappingProxyType, MethodType
from typing import Any

from syncline.abc import WeightSource
from syncline.arrays import is_torch_tensor, torch_module
from syncline.errors import BaseVersionError, ConfigError
from syncline.sources.dirty import Offsets
from syncline.sources.operations import Bucket, Memory, seeing
from syncline.sources.watched_tensor import WatchedTensor, memory_of
from syncline.types import Bits, TensorMeta

CHECKS = ("full", "sampled")
COMPARES = ("operations", "step")
SAMPLED_SHARE = 8
"""With `check="sampled"` every publish looks at one tensor in so many, another each time."""

_NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_REMEDY = "publish(weights, full=True) starts again from the weights as they are"


class WatchedWeights(WeightSource):
    """Weights whose writes are seen; made by `watch`, given to `Publisher.publish`.

    It is a source like any other, and besides tells which units are dirty since the version that was
    published from it last. Publish from the thread that trains: a publish during which a step runs fails.

    Attributes:
        base_sha256: identity of the version that the dirty units are counted from; None: of the moment
            at which the weights were first watched.
    """

    def __init__(
        self,
        optimizers: Iterable[Any],
        weights: Any,
        *,
        dtype: Any,
        check: str,
        compare: str,
        bucket_bytes: int,
        files: Mapping[str, bytes],
    ) -> None:
        _check_options(check, compare, bucket_bytes)
        self._walk = _walker(weights)
        self._dtype = dtype
        self._check = check
        self._compare = compare
        self._files = files
        self._bucket_bytes = bucket_bytes
        self._lock = threading.RLock()
        self._depth = 0
        self._writings = self._read_at = 0
        self._publishes = 0
        self._is_closed = False
        self._unseen: dict[str, str] = {}
        self.base_sha256: str | None = None
        self._begin()
        self._undo = [self._see_step(optimizer) for optimizer in _checked(optimizers)]

    @property
    def memory_bytes(self) -> int:
        """Bytes that are kept between steps: places and old bits of dirty units."""
        return sum(one.memory_bytes for one in self._watched)

    @property
    def peak_copy_bytes(self) -> int:
        """The most bytes of old bits that were held at once while something was written."""
        return self._bucket.peak_bytes

    @contextmanager
    def writing(self) -> Iterator[None]:
        """See what is written to the weights inside, on this thread; nothing else may write them.

        `optimizer.step` is such a block by itself. Use it where weights are written elsewhere: a copy from
        FP32 masters, an average, a clamp, buffers that a forward pass updates.
        """
        with self._lock:
            if self._depth or self._is_closed:
                yield
                return
            self._writings += 1
            self._notice_unseen()
            self._depth = 1
            try:
                with self._seeing():
                    yield
            finally:
                self._depth = 0
                self._compare_all()

    def close(self) -> None:
        """Give the optimizers their own `step` back and see nothing more; what was seen stays."""
        self._is_closed = True
        for undo in self._undo:
            undo()
        self._undo = []

    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        """Yield each tensor once; see `WeightSource.tensors`.

        Raises:
            BaseVersionError: a tensor was added, removed or replaced by another since `watch`; or, after
                the last one, the weights were written meanwhile.
        """
        replaced = self._replaced()
        if replaced:
            raise BaseVersionError(
                f"tensor {replaced[0]!r}, and {len(replaced) - 1} more, were added, removed or replaced "
                f"by others since the weights were first watched; {_REMEDY}, if the names are the same",
                tensor=replaced[0],
            )
        self._read_at = self._writings
        for name, one in self._by_name.items():
            yield TensorMeta(name, one.meta.dtype, one.meta.shape), one.bits()
        self.check_unwritten()

    def files(self) -> Mapping[str, bytes]:
        """Return the checkpoint's other files, as they were given to `watch`."""
        return self._files

    def bits(self, name: str) -> Bits:
        """Return the bits of one tensor as they are now, in host memory."""
        return self._by_name[name].bits()

    def changes(self, name: str) -> Iterator[tuple[int, Offsets, Bits]]:
        """Yield for every window its start, the places of dirty units, and the base's bits there.

        A dirty unit may hold the base's bits again; who encodes compares them.

        Raises:
            BaseVersionError: the tensor was written where it could not be seen.
        """
        fault = self._unseen.get(name, self._by_name[name].fault())
        if fault is not None:
            raise BaseVersionError(
                f"tensor {name!r}: {fault}, outside of optimizer.step and writing(), so what changed is "
                f"not known; {_REMEDY}",
                tensor=name,
            )
        return self._by_name[name].changes()

    def is_to_be_checked(self, name: str) -> bool:
        """Tell whether this publish is to prove the tensor's bits by their fingerprint."""
        if self._check == "full" or self.base_sha256 is None:
            return True
        return self._order[name] % SAMPLED_SHARE == self._publishes % SAMPLED_SHARE

    def check_unwritten(self) -> None:
        """Check that nothing has written the weights since `tensors` was last begun.

        Raises:
            BaseVersionError: something has; nothing of this publish may be committed.
        """
        if self._is_written():
            raise BaseVersionError(
                "the weights were written while they were published; publish between two steps, on the "
                "thread that trains"
            )

    def rebase(self, sha256: str) -> None:
        """Count from now on from this version, which was made of the weights as they are."""
        with self._lock:
            self.base_sha256 = None if self._is_written() else sha256
            self._publishes += 1
            self._unseen = {}
            for one in self._watched:
                one.clear()

    def accept(self) -> None:
        """Take the weights as they are, whatever has written or replaced them, for a full version.

        Deltas stay refused where they were, until that version is committed.

        Raises:
            LayoutError: a weight is no plain torch tensor, or of a dtype that cannot be published.
        """
        with self._lock:
            if self._replaced():
                self._begin()
                return
            self._notice_unseen()
            for one in self._watched:
                one.acknowledge()

    def _begin(self) -> None:
        self._watched, self._by_name = _unite(self._walk(), self._dtype)
        self._order = {name: number for number, name in enumerate(self._by_name)}
        self._memory = Memory(self._watched)
        self._bucket = Bucket(self._bucket_bytes)
        self._unseen = {}
        self.base_sha256 = None

    def _is_written(self) -> bool:
        is_seen = bool(self._depth) or self._writings != self._read_at
        return is_seen or any(one.fault() is not None for one in self._watched)

    def _seeing(self) -> Any:
        if self._compare == "operations":
            return seeing(self._memory, self._bucket)
        self._bucket.hold([one for one in self._watched if not one.is_frozen])
        return nullcontext()

    def _compare_all(self) -> None:
        try:
            self._bucket.flush()
        except BaseException:
            self._unseen = dict.fromkeys(self._by_name, "comparing it with its old bits failed")
            raise
        for one in self._watched:
            one.acknowledge()

    def _notice_unseen(self) -> None:
        for name, one in self._by_name.items():
            fault = one.fault()
            if fault is not None:
                self._unseen.setdefault(name, fault)

    def _replaced(self) -> list[str]:
        """Return the names whose tensors are not the watched ones any more."""
        now = self._walk()
        return sorted(
            name
            for name in now.keys() | self._by_name.keys()
            if name not in now
            or name not in self._by_name
            or not is_torch_tensor(now[name])
            or memory_of(now[name]) != self._by_name[name].memory
        )

    def _see_step(self, optimizer: Any) -> Callable[[], None]:
        """Put a `step` in place that is seen; return what puts the old one back."""
        is_own = "step" in vars(optimizer)
        inner = optimizer.step

        @wraps(inner)
        def step(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with self.writing():
                return inner(*args, **kwargs)

        # A bound method, since learning rate schedulers take methods apart and wrap them again.
        optimizer.step = ours = MethodType(step, optimizer)

        def undo() -> None:
            if vars(optimizer).get("step") is not ours:
                return
            if is_own:
                optimizer.step = inner
            else:
                del optimizer.step

        return undo


def watch(
    optimizers: Any,
    weights: Any,
    *,
    dtype: Any = None,
    check: str = "full",
    compare: str = "operations",
    bucket_bytes: int = 64 << 20,
    files: Mapping[str, bytes] = _NO_FILES,
) -> WatchedWeights:
    """Return weights that see what `optimizer.step` changes in them, exactly; give them to a publisher.

    A publisher then needs no copy of the last version: what is kept is which units changed, and their
    old bits. Deltas are the same as those of the copy, byte for byte.

    Args:
        optimizers: a torch optimizer, or several. They may hold the weights themselves, or masters.
        weights: a torch module (its parameters and persistent buffers), or torch tensors by canonical
            name. Tied names are all published.
        dtype: the torch dtype in which floating-point weights are published; None: their own.
        check: `full`: every publish proves every tensor by its fingerprint, so that a write that was
            not seen is found; `sampled`: every eighth tensor, another eighth each time.
        compare: `operations`: copy, run and compare one operation of torch after the other, a bucket at
            a time; `step`: copy all weights for the time of a step, for optimizers whose kernels torch
            does not know of.
        bucket_bytes: the most old bits to hold while weights are written, unless one operation writes
            a larger tensor, or several that cannot be taken apart.
        files: the checkpoint's other files by name, for the first version of a run.

    Raises:
        ConfigError: not an optimizer of torch, or a setting that does not exist.
        LayoutError: a weight is no plain torch tensor (a DTensor, say), or of a dtype that cannot be sent.

    Example:
        >>> import torch, syncline
        >>> model = torch.nn.Linear(64, 64).to(torch.bfloat16)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        >>> weights, publisher = syncline.watch(optimizer, model), syncline.Publisher(syncline.MemoryStore())
        >>> publisher.publish(weights).kind
        'full'
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> publisher.publish(weights).kind
        'delta'
    """
    several = optimizers if isinstance(optimizers, Iterable) else [optimizers]
    return WatchedWeights(
        several,
        weights,
        dtype=dtype,
        check=check,
        compare=compare,
        bucket_bytes=bucket_bytes,
        files=files,
    )


def _check_options(check: str, compare: str, bucket_bytes: int) -> None:
    if check not in CHECKS:
        raise ConfigError(f"check: expected one of {', '.join(CHECKS)}, found {check!r}")
    if compare not in COMPARES:
        raise ConfigError(f"compare: expected one of {', '.join(COMPARES)}, found {compare!r}")
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes: expected at least 1, found {bucket_bytes}")


def _checked(optimizers: Iterable[Any]) -> Iterator[Any]:
    for optimizer in optimizers:
        if not isinstance(optimizer, torch_module().optim.Optimizer):
            raise ConfigError(
                f"optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}, whose "
                "writes cannot be seen; publish the weights without watching them"
            )
        yield optimizer


def _walker(weights: Any) -> Callable[[], Mapping[str, Any]]:
    """Return what finds the weights by name, again each time it is called."""
    if hasattr(weights, "state_dict"):
        return lambda: dict(weights.state_dict(keep_vars=True))
    if isinstance(weights, Mapping):
        return lambda: dict(weights)
    if isinstance(weights, Iterable):
        pairs = dict(weights)
        return lambda: pairs
    raise ConfigError(
        f"weights: expected a torch module or torch tensors by name, found {type(weights).__name__}"
    )


def _unite(
    tensors: Mapping[str, Any], dtype: Any
) -> tuple[list[WatchedTensor], dict[str, WatchedTensor]]:
    """Return one watched tensor for each memory, and which of them each name stands for."""
    by_name: dict[str, WatchedTensor] = {}
    by_memory: dict[tuple[object, ...], WatchedTensor] = {}
    for name, tensor in tensors.items():
        one = WatchedTensor(name, tensor, dtype)
        is_alone = tensor.numel() == 0
        by_name[name] = one if is_alone else by_memory.setdefault(one.memory, one)
    return list(dict.fromkeys(by_name.values())), by_name
