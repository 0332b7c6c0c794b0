"""Weights that are in this process already: torch tensors and numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from syncline import arrays
from syncline.abc import WeightSource
from syncline.errors import ConfigError, LayoutError
from syncline.types import Bits, TensorMeta

_NO_FILES: Mapping[str, bytes] = MappingProxyType({})


class MemorySource(WeightSource):
    """Torch tensors and numpy arrays by canonical name, read where they are.

    Args:
        tensors: a mapping, or pairs of name and tensor. BF16 and FP8 come as torch tensors or as arrays
            of ml_dtypes. A generator of pairs can be read once.
        files: the checkpoint's other files by name, for the first version of a run.

    Aliasing: the bits are a view of the tensor's memory where that is contiguous, else one tensor at a
    time is copied. Those of a tensor in GPU memory stay there (`DeviceBits`); other devices' are copied
    to the host.

    Example:
        >>> import numpy as np
        >>> source = MemorySource({"w": np.array([1, 2], np.int8)})
        >>> [(meta.name, bits.tolist()) for meta, bits in source.tensors()]
        [('w', [1, 2])]
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
        files: Mapping[str, bytes] = _NO_FILES,
    ) -> None:
        self._tensors = tensors
        self._files = files
        self._is_spent = False
        # A generator may fill one tensor again and again; what a collection holds stays there.
        self.is_stable = not isinstance(tensors, Iterator)

    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        """Yield each tensor once; see `WeightSource.tensors`.

        Raises:
            LayoutError: a name comes twice, or a value is no plain tensor of a dtype that can be sent.
            ConfigError: what was given are not pairs of a name and a tensor, or a generator that was
                read before.
        """
        seen: set[str] = set()
        for pair in self._pairs():
            name, value = _checked(pair)
            if name in seen:
                raise LayoutError(
                    f"tensor {name!r} came twice; every name is published once", tensor=name
                )
            seen.add(name)
            if arrays.is_on_gpu(value):
                yield arrays.device_bits(name, value)
            else:
                yield arrays.as_bits(name, value)

    def files(self) -> Mapping[str, bytes]:
        """Return the files that the source was made with."""
        return self._files

    def _pairs(self) -> Iterable[tuple[str, Any]]:
        if isinstance(self._tensors, Mapping):
            return self._tensors.items()
        if self._is_spent:
            raise ConfigError(
                "the weights were given as a generator, which is empty after the first reading; "
                "make a new source for every version, or pass a mapping"
            )
        self._is_spent = isinstance(self._tensors, Iterator)
        return self._tensors


def _checked(pair: object) -> tuple[str, Any]:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ConfigError(
            f"weights: expected pairs of a name and a tensor, found {type(pair).__name__}; pass "
            "module.state_dict() or module.named_parameters()"
        )
    name, value = pair
    if not isinstance(name, str) or not name:
        raise LayoutError(f"a tensor's name must be a string, not empty, found {name!r:.80}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise LayoutError(f"tensor {name!r:.80}: its name is not text: {error.reason}") from error
    return name, value
