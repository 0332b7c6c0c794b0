"""Patches in checkpoint coordinates: what vLLM's sparse_nccl takes, there and back, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from syncline import kernels
from syncline.errors import CodecError, ConfigError, FormatError, LayoutError
from syncline.interchange import vllm_patches
from syncline.types import Changes, TensorMeta, Window

META = TensorMeta("w", "BF16", (50, 4))
INFO = {
    "names": ["w"],
    "dtype_names": ["bfloat16"],
    "shapes": [[50, 4]],
    "num_updates_list": [2],
}


def windows(old, new, units=64):
    for start in range(0, new.size, units):
        piece = new[start : start + units]
        yield Window(start, piece, *kernels.diff(old[start : start + units], piece))


def base(name):
    if name != "w":
        raise LayoutError(f"no {name}", tensor=name)
    return META, np.zeros(200, np.uint16)


def test_patches_are_read_back_bit_for_bit(rng):
    old = rng.integers(0, 0x7F80, 200, np.uint16)
    new = old.copy()
    new[[0, 63, 64, 199]] ^= 0x8001
    same = TensorMeta("same", "BF16", (200,))
    sent = list(vllm_patches.patches([(META, windows(old, new)), (same, windows(old, old))]))
    assert [patch.meta.name for patch in sent] == ["w"]
    assert sent[0].indices.dtype == np.int32
    assert sent[0].indices.tolist() == [0, 63, 64, 199]
    info = vllm_patches.update_info(sent)
    assert info == {**INFO, "num_updates_list": [4]}
    found = old.copy()
    read = vllm_patches.read(info, [(patch.indices, patch.bits) for patch in sent], base)
    for meta, pieces in read:
        assert meta == META
        for piece in pieces:
            assert isinstance(piece, Changes)
            found[piece.start + piece.offsets.astype(np.int64)] = piece.bits
    assert found.tobytes() == new.tobytes()


@pytest.mark.parametrize(
    ("dtype", "bits", "words"),
    [
        ("BF16", 0x7FC0, "a new value is NaN"),
        ("BF16", 0xFF81, "a new value is NaN"),
        ("F16", 0x7C01, "a new value is NaN"),
        ("F32", 0x7F800001, "a new value is NaN"),
        ("F64", 0x7FF0000000000001, "a new value is NaN"),
        ("F8_E4M3", 1, "a patch carries BF16, F16, F32, F64 alone, found F8_E4M3"),
        ("I32", 1, "found I32"),
    ],
)
def test_what_a_patch_cannot_say_is_refused_by_name(dtype, bits, words):
    meta = TensorMeta("w", dtype, (3,))
    old = np.zeros(3, f"<u{meta.unit_bytes}")
    new = old.copy()
    new[1] = bits
    with pytest.raises(CodecError, match=words) as caught:
        list(vllm_patches.patches([(meta, windows(old, new))]))
    assert caught.value.tensor == "w"


def test_infinities_are_no_nan():
    old, new = np.zeros(2, np.uint16), np.array([0x7F80, 0xFF80], np.uint16)
    meta = TensorMeta("w", "BF16", (2,))
    assert len(list(vllm_patches.patches([(meta, windows(old, new))]))) == 1


def test_positions_that_int32_cannot_hold_are_refused():
    meta = TensorMeta("w", "BF16", (1 << 32,))
    one = np.ones(1, np.uint16)
    far = Window(1 << 31, one, np.zeros(1, np.uint32), one * 0, one)
    with pytest.raises(CodecError, match="position 2147483648 is beyond 2147483647"):
        list(vllm_patches.patches([(meta, [far])]))


def test_nothing_to_send():
    with pytest.raises(ConfigError, match="there is no patch"):
        vllm_patches.update_info([])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": None}, "must be lists of one length"),
        ({"names": []}, "must be lists of one length"),
        ({"surprise": []}, "surprise is not a known key"),
        ({"dtype_names": ["float8_e4m3fn"]}, r"dtype_names\[0\] must be one of"),
    ],
)
def test_update_info_that_breaks_a_rule(change, words):
    with pytest.raises(FormatError, match=words):
        list(vllm_patches.read({**INFO, **change}, [], base))
    with pytest.raises(FormatError, match="shapes is missing"):
        list(vllm_patches.read({k: v for k, v in INFO.items() if k != "shapes"}, [], base))


def test_a_tensor_named_twice():
    twice = {key: value * 2 for key, value in INFO.items()}
    with pytest.raises(FormatError, match=r"names\[1\]: 'w' is there twice"):
        list(vllm_patches.read(twice, [], base))


@pytest.mark.parametrize(
    ("indices", "bits", "words"),
    [
        (np.array([1, 2], np.int64), [1, 2], "expected 2 int32 indices, found int64"),
        (np.array([1], np.int32), [1], "expected 2 int32 indices"),
        (np.array([1, 2], np.int32), [1], "one value for each position"),
        (np.array([2, 1], np.int32), [1, 2], "position 1 must be after 2"),
        (np.array([1, 1], np.int32), [1, 2], "position 1 must be after 1"),
        (np.array([-1, 1], np.int32), [1, 2], "position 0 must be from 0 to 199"),
        (np.array([1, 200], np.int32), [1, 2], "position 1 must be from 0 to 199"),
        (np.array([1, 2], np.int32), [1, 0x7FFF], "a new value is NaN"),
    ],
)
def test_arrays_that_break_a_rule(indices, bits, words):
    read = vllm_patches.read(INFO, [(indices, np.array(bits, np.uint16))], base)
    with pytest.raises(CodecError, match=words):
        [list(pieces) for _, pieces in read]


def test_arrays_of_another_width_or_tensor():
    with pytest.raises(CodecError, match="expected flat bits of BF16"):
        list(vllm_patches.read(INFO, [(np.array([1, 2], np.int32), np.zeros(2, np.uint32))], base))
    other = {**INFO, "shapes": [[50, 5]]}
    with pytest.raises(LayoutError, match="the version says BF16"):
        list(vllm_patches.read(other, [(np.array([1, 2], np.int32), np.zeros(2, np.uint16))], base))
