"""The frozen values that travel between stages: no torch, no I/O, nothing but numpy.

Elements are counted in **units**: a unit is one element, or one byte where a dtype packs several
elements into a byte. Bits are always unsigned integers of the unit's width; no float is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.errors import ConfigError, LayoutError

LONGEST_S = 7 * 86_400
"""The longest that anything can be told to wait: what every call of the system takes."""

Bits = NDArray[Any]
"""Flat array of uint8, uint16, uint32 or uint64, little-endian: the bits of consecutive units."""

DeviceBits = Any
"""The same as a torch tensor in GPU memory, taken where it is said: flat, contiguous, unsigned."""

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U16": 16,
        "I16": 16,
        "F16": 16,
        "BF16": 16,
        "U32": 32,
        "I32": 32,
        "F32": 32,
        "U64": 64,
        "I64": 64,
        "F64": 64,
        "C64": 64,
    }
)
"""Bits per element of every dtype that safetensors knows, by its safetensors name."""

WINDOW_UNITS = 1 << 22
"""Units that are detected, encoded and applied at a time; all but a tensor's last window are full.

Large enough for the entropy coder, small enough to hold many at once.
"""

_UNSIGNED: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {nbytes: np.dtype(f"<u{nbytes}") for nbytes in (1, 2, 4, 8)}
)


def unsigned(unit_bytes: int) -> np.dtype[Any]:
    """Return the little-endian unsigned numpy dtype of `unit_bytes` (1, 2, 4 or 8) bytes."""
    return _UNSIGNED[unit_bytes]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One canonical tensor: HF name, safetensors dtype name, full shape.

    Raises:
        LayoutError: the dtype is unknown, a dimension is negative, or the tensor does not end on a
            byte boundary.

    Example:
        >>> meta = TensorMeta("model.norm.weight", "BF16", (640,))
        >>> meta.nbytes, meta.unit_bytes, meta.unit_count
        (1280, 2, 640)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise LayoutError(
                f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {sorted(DTYPE_BITS)}",
                tensor=self.name,
            )
        if any(side < 0 for side in self.shape):
            raise LayoutError(
                f"tensor {self.name!r}: shape {self.shape} has a negative side", tensor=self.name
            )
        if self.count * DTYPE_BITS[self.dtype] % 8:
            raise LayoutError(
                f"tensor {self.name!r}: {self.count} elements of {self.dtype} do not fill whole "
                "bytes",
                tensor=self.name,
            )

    @property
    def count(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.count * DTYPE_BITS[self.dtype] // 8

    @property
    def unit_bytes(self) -> int:
        """Bytes of the unit in which changes are counted: 1, 2, 4 or 8."""
        return max(1, DTYPE_BITS[self.dtype] // 8)

    @property
    def unit_count(self) -> int:
        """Number of units in the tensor."""
        return self.nbytes // self.unit_bytes


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A position-keyed sum over the bits of a tensor or a model: two 64-bit lanes.

    It adds up over disjoint pieces in any order, and changes by the difference of what changed.

    Example:
        >>> Fingerprint.from_hex("00000000000000ff0000000000000001") + Fingerprint(1, 1)
        Fingerprint(a=256, b=2)
    """

    a: int
    b: int

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint((self.a + other.a) & _MASK, (self.b + other.b) & _MASK)

    def __sub__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint((self.a - other.a) & _MASK, (self.b - other.b) & _MASK)

    def hex(self) -> str:
        """Return 32 lowercase hex digits: lane a, then lane b, most significant digit first."""
        return f"{self.a:016x}{self.b:016x}"

    @classmethod
    def from_hex(cls, text: str) -> Fingerprint:
        """Read what `hex` wrote; the caller has checked that it is 32 hex digits."""
        return cls(int(text[:16], 16), int(text[16:], 16))


_MASK = (1 << 64) - 1
ZERO = Fingerprint(0, 0)
"""The fingerprint of nothing at all."""


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Overwrite form of a change set inside one window of a tensor.

    Attributes:
        start: unit index of the window in the canonical tensor (64-bit).
        offsets: (k,) uint32, strictly ascending, relative to `start`.
        bits: (k,) unsigned, the new bits at those places.
        base_bits: (k,) unsigned, the base's bits there, if decoding had to look at them.
    """

    start: int
    offsets: NDArray[np.uint32]
    bits: Bits
    base_bits: Bits | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """New bits for every unit of one window: `bits[i]` belongs at unit `start + i`."""

    start: int
    bits: Bits


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One window of a tensor as a publisher sees it: its new bits, and what differs from the base.

    Attributes:
        start: unit index of the window in the canonical tensor.
        new: dense new bits; a view that is valid until the next window is asked for.
        offsets: (k,) uint32, strictly ascending, relative to `start`: where old and new differ.
        old_bits, new_bits: (k,) unsigned, the bits before and after at those places.
    """

    start: int
    new: Bits
    offsets: NDArray[np.uint32]
    old_bits: Bits
    new_bits: Bits


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One entry of a journal: what to overwrite in one window of one tensor, and what stood there.

    Attributes:
        name: canonical name of the tensor.
        start: unit index of the window in the canonical tensor.
        offsets: (k,) uint32, strictly ascending, relative to `start`; None if the record covers the
            k consecutive units from `start`.
        old_bits, new_bits: (k,) unsigned, the bits before and after.
    """

    name: str
    start: int
    offsets: NDArray[np.uint32] | None
    old_bits: Bits
    new_bits: Bits


@dataclass(frozen=True, slots=True)
class Read:
    """One stretch of a peer's memory to be read: where it lies there, and where it belongs here.

    Attributes:
        region, offset: the peer's registered region, and the first byte in it.
        into, place: the region on this side, and the first byte in it.
        nbytes: how much; 0 is allowed and reads nothing.
    """

    region: str
    offset: int
    into: str
    place: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object in a store: its key and its size."""

    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """A named point that a long operation has reached; observers draw progress from it.

    Attributes:
        name: for example `publish.part_written`; every module lists its own in `STEPS`.
        done_bytes, total_bytes: how far the operation is, where that is known; else 0.
    """

    name: str
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed text, as token ids, whose second half is scored: trainer and engine both do it.

    Attributes:
        prompt: token ids of the context, at least one.
        continuation: token ids that follow it, at least one; each gets a log-probability.

    Raises:
        ConfigError: one of them is empty, or holds what is no token id (0 to 2**31 - 1).
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, tokens in (("prompt", self.prompt), ("continuation", self.continuation)):
            if not tokens:
                raise ConfigError(f"probe: expected at least one token in the {name}, found none")
            for token in tokens:
                if type(token) is not int or not 0 <= token < 1 << 31:
                    raise ConfigError(
                        f"probe: expected token ids from 0 to 2**31 - 1 in the {name}, found {token!r:.80}"
                    )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and continuation."""
        return self.prompt + self.continuation


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a model makes of one probe: natural logarithms of probabilities, at temperature 1.

    Attributes:
        logprobs: (n,) float64, of each token of the continuation given all before it; NaN or an
            infinity is kept where that is what the model computed.
        top_tokens: (n, k) int64, the k most probable tokens at each place, most probable first; k may
            be 0.
        top_logprobs: (n, k) float64, theirs.
        resumed: the last token's log-probability once more, computed by way of the engine's prefix
            cache; None from a scorer that has none.
    """

    logprobs: NDArray[np.float64]
    top_tokens: NDArray[np.int64]
    top_logprobs: NDArray[np.float64]
    resumed: float | None = None


def check_seconds(what: str, value: float) -> float:
    """Return a time to wait, as it was given; 0: do not wait.

    Raises:
        ConfigError: it is no number from 0 to `LONGEST_S`. NaN would wait for ever, infinity fits no system call.

    Example:
        >>> check_seconds("timeout_s", 2.5)
        2.5
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= LONGEST_S:
        raise ConfigError(f"{what}: expected seconds from 0 to {LONGEST_S}, found {value!r:.80}")
    return value
