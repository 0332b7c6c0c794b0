"""The GPU kernels equal plain numpy, bit for bit: interpreted on the host, or on a GPU with `-m gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import kernels
from syncline.errors import CodecError, ConfigError, LayoutError
from syncline.kernels import backend, reference
from syncline.types import ZERO, Bits, DeviceBits

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux alone", allow_module_level=True)

torch = pytest.importorskip("torch")
from syncline.kernels import gpu  # noqa: E402 - needs torch; triton is in the test extra

SEEDS = kernels.seeds("model.layers.0.weight")
BLOCK = gpu.BLOCK_UNITS
EDGES = [0, 1, 7, 8, 1023, 1024, 1025, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]
FEW = settings(max_examples=settings.get_profile("ci").max_examples // 2)


@pytest.fixture(
    params=["interpreted", pytest.param("on a GPU", marks=pytest.mark.gpu)], autouse=True
)
def place(request: pytest.FixtureRequest) -> str:
    """Where the kernels run; that is settled when Triton is imported, by what tests are asked for."""
    assert gpu.is_interpreting() == (request.param == "interpreted")
    return request.param


def on_device(bits: Bits) -> DeviceBits:
    tensor = torch.from_numpy(bits.copy())
    return tensor if gpu.is_interpreting() else tensor.cuda()


def on_host(bits: DeviceBits) -> Bits:
    return bits.cpu().numpy()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """Old and new bits of one width, with any share of changes, alone or in clusters."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.sampled_from(EDGES) | st.integers(0, 3 * BLOCK))
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old, new = rng.integers(0, 256, (2, count * width), np.uint8).view(f"<u{width}")
    keep = rng.random(count) >= share
    if draw(st.booleans()):
        keep = np.sort(keep)
    new[keep] = old[keep]
    return old, new


@FEW
@given(pair=pairs(), refresh=st.booleans())
def test_diff(pair: tuple[Bits, Bits], refresh: bool) -> None:
    old, new = pair
    mine, theirs, read = on_device(old), old.copy(), on_device(new)
    found = kernels.diff(mine, read, refresh=refresh)
    wanted = reference.diff(theirs, new, refresh=refresh)
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(on_host(left), right, strict=True)
    np.testing.assert_array_equal(on_host(mine), theirs)
    np.testing.assert_array_equal(on_host(read), new)


@FEW
@given(pair=pairs())
def test_scatter_and_gather(pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    offsets, old_bits, new_bits = reference.diff(old.copy(), new, refresh=False)
    target, places = on_device(old), on_device(offsets)
    np.testing.assert_array_equal(on_host(kernels.gather(target, places)), old_bits, strict=True)
    kernels.scatter(target, places, on_device(new_bits))
    np.testing.assert_array_equal(on_host(target), new)


@FEW
@given(offsets=st.lists(st.integers(0, 99), max_size=300))
def test_gather_takes_offsets_in_any_order(offsets: list[int]) -> None:
    source, places = np.arange(100, dtype=np.uint16), np.array(offsets, np.uint32)
    found = kernels.gather(on_device(source), on_device(places))
    np.testing.assert_array_equal(on_host(found), places)


@FEW
@given(pair=pairs(), start=st.sampled_from([0, 1, 8, 1000, 1023, 1024, 5555, 2**40 + 7, 2**62 - 1]))
def test_fingerprint(pair: tuple[Bits, Bits], start: int) -> None:
    old, new = pair
    before = kernels.fingerprint(on_device(old), start, SEEDS)
    after = kernels.fingerprint(on_device(new), start, SEEDS)
    assert before == reference.fingerprint(old, start, SEEDS)
    assert after == reference.fingerprint(new, start, SEEDS)
    changes = reference.diff(old, new, refresh=False)
    change = kernels.fingerprint_change(start, *map(on_device, changes), SEEDS)
    assert change == reference.fingerprint_change(start, *changes, SEEDS)
    assert before + change == after


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_fingerprint_of_the_largest_digits_over_many_rows(width: int) -> None:
    count = (gpu.ROWS_A_PROGRAM + 2) * reference.ROW_DIGITS + 5
    bits = np.full(count, -1, f"i{width}").view(f"u{width}")
    assert kernels.fingerprint(on_device(bits), 3, SEEDS) == reference.fingerprint(bits, 3, SEEDS)


def test_fingerprint_of_pieces_adds_up_whatever_the_pieces_memory() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 16, 5000, np.uint16)
    tensor = on_device(bits)
    parts = [
        kernels.fingerprint(tensor[cut : cut + 1111], cut, SEEDS) for cut in range(0, 5000, 1111)
    ]
    assert sum(parts, ZERO) == reference.fingerprint(bits, 0, SEEDS)


@pytest.mark.parametrize("bad", [100, 2**31, 2**32 - 1])
def test_nothing_is_written_if_an_offset_is_out_of_range(bad: int) -> None:
    target = on_device(np.zeros(100, np.uint16))
    offsets = np.array([*range(99), bad], np.uint32)
    with pytest.raises(CodecError, match=f"offset 99 of the changes is {bad}, which is not below"):
        kernels.scatter(target, on_device(offsets), on_device(np.ones(100, np.uint16)))
    with pytest.raises(CodecError, match=f"offset 99 of the changes is {bad}, which is not below"):
        kernels.gather(target, on_device(offsets))
    assert not on_host(target).any()


def test_scatter_refuses_offsets_that_do_not_rise_wherever_they_are() -> None:
    offsets = np.arange(gpu.BLOCK_CHANGES + 2, dtype=np.uint32)
    offsets[gpu.BLOCK_CHANGES] = (
        gpu.BLOCK_CHANGES - 1
    )  # the first of a block, against the block before
    target = on_device(np.zeros(5000, np.uint8))
    with pytest.raises(CodecError, match=f"offset {gpu.BLOCK_CHANGES} of the changes"):
        kernels.scatter(target, on_device(offsets), on_device(np.ones(offsets.size, np.uint8)))
    assert not on_host(target).any()


U16 = np.arange(8, dtype=np.uint16)
U32 = np.arange(3, dtype=np.uint32)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: kernels.diff(on_device(U16), on_device(U16.view(np.uint8))), "one width"),
        (lambda: kernels.diff(on_device(U16), on_device(U16[:5])), "one length, not 8 and 5"),
        (lambda: kernels.diff(on_device(U16), U16), "must be torch tensors .* not ndarray"),
        (lambda: kernels.diff(torch.zeros(3), torch.zeros(3)), "not torch.float32"),
        (lambda: kernels.gather(on_device(U16)[::2], on_device(U32)), "contiguous"),
        (lambda: kernels.gather(on_device(U16), on_device(U16)), "must be uint32"),
        (lambda: kernels.scatter(on_device(U16), on_device(U16), on_device(U16)), "must be uint32"),
        (
            lambda: kernels.scatter(on_device(U16), on_device(U32), on_device(U16[:2])),
            "3 offsets for 2 units",
        ),
        (lambda: kernels.scatter(on_device(U16), on_device(U32), on_device(U32)), "one width"),
        (lambda: kernels.fingerprint(on_device(U16), -1, SEEDS), "not -1"),
    ],
)
def test_refused(call, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        call()


def test_host_memory_is_refused_where_the_kernels_are_compiled(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "is_interpreting", lambda: False)
    with pytest.raises(ConfigError, match="a tensor on cpu; pass its numpy view"):
        kernels.fingerprint(torch.from_numpy(U16), 0, SEEDS)


def test_without_triton_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install syncline\[gpu\]"):
        kernels.fingerprint(torch.from_numpy(U16), 0, SEEDS)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_for_a_gpu_without_spills_and_with_wide_loads(
    capability: int, tmp_path: Path
) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).parent.parent / "compile_gpu_kernels.py"
    out = subprocess.run(
        [sys.executable, "-W", "error", script, str(capability)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    assert {(kernel["name"], kernel["unit_bytes"]) for kernel in found} >= {
        (name, width)
        for name in ("compare", "compact", "scatter", "gather", "fingerprint")
        for width in (1, 2, 4)
    } | {("compare", 8), ("compact", 8), ("first_fault", 4), ("fingerprint_change", 4)}
    for kernel in found:
        assert kernel["machine_code_bytes"] > 0
        assert kernel["stack_bytes"] == 0, kernel
        assert kernel["registers"] <= 128, kernel
        if (
            kernel["name"] in ("compare", "fingerprint")
            and kernel["unit_bytes"] > 1
            and kernel["units"] >= 4096
        ):
            assert kernel["wide_loads"] > 0, kernel
