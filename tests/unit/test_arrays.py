"""Torch tensors and numpy arrays as bits: every dtype, every bit, and no copy where none is needed."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.arrays import NUMPY_NAMES, as_bits
from syncline.errors import LayoutError
from syncline.types import DTYPE_BITS

torch = pytest.importorskip("torch")


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def random_bytes(nbytes: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("name", sorted(NUMPY_NAMES))
@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (0,), (3, 0), (2, 1, 3)])
def test_numpy_arrays_of_every_dtype(name: str, shape: tuple[int, ...]) -> None:
    dtype = numpy_dtype(name)
    raw = random_bytes(int(np.prod(shape)) * dtype.itemsize)
    array = raw.view(dtype).reshape(shape)
    meta, bits = as_bits("w", array)
    assert (meta.name, meta.dtype, meta.shape) == ("w", NUMPY_NAMES[name], shape)
    assert bits.tobytes() == raw.tobytes()
    assert bits.shape == (meta.unit_count,)
    assert bits.dtype == np.dtype(f"<u{dtype.itemsize}")
    assert array.size == 0 or np.shares_memory(bits, array)


@pytest.mark.parametrize("name", sorted(NUMPY_NAMES))
@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (0,), (3, 0), (2, 1, 3)])
@pytest.mark.parametrize("is_parameter", [False, True])
def test_torch_tensors_of_every_dtype(
    name: str, shape: tuple[int, ...], is_parameter: bool
) -> None:
    dtype = getattr(torch, name)
    tensor = torch.empty(shape, dtype=dtype)
    raw = random_bytes(tensor.nbytes)
    if raw.size:
        tensor = torch.from_numpy(raw).view(dtype).reshape(shape)
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=dtype.is_floating_point)
    meta, bits = as_bits("w", tensor)
    assert (meta.name, meta.dtype, meta.shape) == ("w", NUMPY_NAMES[name], shape)
    assert bits.tobytes() == raw.tobytes()
    assert raw.size == 0 or np.shares_memory(bits, raw)


@pytest.mark.parametrize("name", sorted(NUMPY_NAMES))
def test_tensors_that_do_not_lie_in_order(name: str) -> None:
    dtype = getattr(torch, name)
    raw = random_bytes(12 * dtype.itemsize)
    tensor = torch.from_numpy(raw).view(dtype).reshape(3, 4)
    expected = raw.reshape(3, 4, -1).transpose(1, 0, 2)
    meta, bits = as_bits("w", tensor.T)
    assert meta.shape == (4, 3)
    assert bits.tobytes() == expected.tobytes()
    assert as_bits("w", tensor[:, ::2])[1].tobytes() == raw.reshape(3, 4, -1)[:, ::2].tobytes()


def test_arrays_that_do_not_lie_in_order() -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    for view in (array.T, array[::-1], array[:, 1:3], array[:, ::-2]):
        meta, bits = as_bits("w", view)
        assert meta.shape == view.shape
        assert bits.tobytes() == view.tobytes()


def test_unaligned_memory_is_viewed() -> None:
    raw = np.arange(9, dtype=np.uint8)
    _, bits = as_bits("w", np.frombuffer(raw.data, np.float32, 2, 1))
    assert bits.tobytes() == raw[1:].tobytes()
    assert np.shares_memory(bits, raw)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_big_endian_arrays_become_little_endian_bit_for_bit(units: list[int]) -> None:
    array = np.array(units, ">u4").view(">f4")
    meta, bits = as_bits("w", array)
    assert meta.dtype == "F32"
    assert bits.tolist() == units


def test_packed_four_bit_floats_count_both_halves() -> None:
    raw = random_bytes(6)
    meta, bits = as_bits("w", torch.from_numpy(raw).view(torch.float4_e2m1fn_x2).reshape(2, 3))
    assert (meta.dtype, meta.shape, meta.nbytes) == ("F4", (2, 6), 6)
    assert bits.tobytes() == raw.tobytes()


def test_lazy_conjugates_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert as_bits("w", tensor.conj())[1].tobytes() == np.array([1 - 2j, 3 + 4j], "c8").tobytes()
    assert as_bits("w", tensor.conj().imag)[1].tobytes() == np.array([-2, 4], "f4").tobytes()


REFUSED = {
    "a number": 3.0,
    "a list": [1.0],
    "a numpy scalar": np.float32(1),
    "complex128": np.zeros(1, np.complex128),
    "objects": np.array([None]),
    "text": np.array(["x"]),
    "times": np.zeros(1, "M8[s]"),
    "records": np.zeros(1, "f4,f4"),
    "unpacked fp4": np.zeros(2, ml_dtypes.float4_e2m1fn),
    "a masked array": np.ma.array([1.0], mask=[True]),
    "torch complex128": torch.zeros(1, dtype=torch.complex128),
    "sparse": torch.zeros(2, 2).to_sparse(),
    "meta": torch.zeros(2, device="meta"),
    "nested": torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(LayoutError, match=r"'layer\.weight'") as caught:
        as_bits("layer.weight", value)
    assert caught.value.tensor == "layer.weight"


def test_every_dtype_that_numpy_or_torch_can_hold_is_known() -> None:
    without_dtype = {"F4", "F6_E2M3", "F6_E3M2"}
    assert set(NUMPY_NAMES.values()) == DTYPE_BITS.keys() - without_dtype


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, numpy as np; from syncline.arrays import as_bits, is_torch_tensor; "
        "as_bits('w', np.zeros(1)); print(is_torch_tensor(0), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
