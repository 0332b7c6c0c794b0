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
from types import MethodType
from typing import Any

from syncline.abc import WeightSource
from syncline.arrays import is_torch_tensor
from syncline.errors import BaseVersionError
from syncline.sources.dirty import Offsets
from syncline.sources.operations import Bucket, Memory, seeing
from syncline.sources.watched_tensor import WatchedTensor, memory_of
from syncline.types import Bits, TensorMeta

SAMPLED_SHARE = 8
"""With `check="sampled"` every publish looks at one tensor in so many, another each time."""

_REMEDY = "publish(weights, full=True) starts again from the weights as they are"


class WatchedWeights(WeightSource):
    """Weights whose writes are seen; made by `watch`, given to `Publisher.publish`.

    It is a source like any other, and besides tells which units are dirty since the version that was
    published from it last. Publish from the thread that trains: a publish during which a step runs fails.

    Its bits are views of live memory where that is contiguous and on the host, so they are stable.

    Args:
        optimizers: whose steps to see; anything with a method `step`.
        walk: finds the weights by name, again each time it is called.
        dtype, check, compare, bucket_bytes, files: see `watch`.

    Attributes:
        base_sha256: identity of the version that the dirty units are counted from; None: of the moment
            at which the weights were first watched.
    """

    is_stable = True

    def __init__(
        self,
        optimizers: Iterable[Any],
        walk: Callable[[], Mapping[str, Any]],
        *,
        dtype: Any,
        check: str,
        compare: str,
        bucket_bytes: int,
        files: Mapping[str, bytes],
    ) -> None:
        self._walk = walk
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
        self._undo = [self._see_step(optimizer) for optimizer in optimizers]

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
        for meta in self.begin():
            yield meta, self.bits(meta.name)
        self.check_unwritten()

    def begin(self) -> list[TensorMeta]:
        """Return what the tensors are; from now on `check_unwritten` finds whether they were written.

        Raises:
            BaseVersionError: a tensor was added, removed or replaced by another since `watch`.
        """
        replaced = self._replaced()
        if replaced:
            raise BaseVersionError(
                f"tensor {replaced[0]!r}, and {len(replaced) - 1} more, were added, removed or replaced "
                f"by others since the weights were first watched; {_REMEDY}, if the names are the same",
                tensor=replaced[0],
            )
        self._read_at = self._writings
        return [
            TensorMeta(name, one.meta.dtype, one.meta.shape) for name, one in self._by_name.items()
        ]

    def files(self) -> Mapping[str, bytes]:
        """Return the checkpoint's other files, as they were given to `watch`."""
        return self._files

    def bits(self, name: str) -> Bits:
        """Return the bits of one tensor as they are now, in host memory."""
        return self._by_name[name].bits()

    def changes(self, name: str, start: int) -> tuple[Offsets, Bits]:
        """Return the places of dirty units in the window from unit `start`, and the base's bits there.

        A dirty unit may hold the base's bits again; who encodes compares them.
        """
        return self._by_name[name].changes(start)

    def require_seen(self, name: str) -> None:
        """Check that all writes of a tensor were seen, as far as torch counts them.

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

    def is_to_be_checked(self, name: str) -> bool:
        """Tell whether this publish is to prove the tensor's bits by their fingerprint."""
        if self._check == "full" or self.base_sha256 is None:
            return True
        return self._order[name] % SAMPLED_SHARE == self._publishes % SAMPLED_SHARE

    def check_unwritten(self) -> None:
        """Check that nothing has written the weights since they were last read.

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
            self._bucket.drop()  # older than the version that comes next
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
