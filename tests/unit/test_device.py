"""Bits that lie on a device: the same code over host memory, where every step is done at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from syncline import device
from syncline.device import DeviceCopies, SideStream
from syncline.errors import ConfigError
from syncline.types import Bits, TensorMeta

torch = pytest.importorskip("torch")
META = TensorMeta("w", "U16", (2500,))
WINDOW = 1000


@pytest.fixture(autouse=True)
def small_windows(pretend_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "WINDOW_UNITS", WINDOW)


@pytest.fixture
def base(rng: np.random.Generator) -> Bits:
    return rng.integers(0, 1 << 16, META.count, np.uint16)


def tensor(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.copy())


def test_a_side_stream_says_what_it_is() -> None:
    assert repr(SideStream(torch.device("cpu"))) == "SideStream(cpu, at once)"
    assert device.side_stream(torch.device("cpu")) is device.side_stream(torch.device("cpu"))


def test_what_comes_belongs_to_the_caller(base: Bits) -> None:
    there = tensor(base)
    side = SideStream(torch.device("cpu"))
    side.follow()
    first, second = side.bring(there, there[:5]).wait()
    side.wait()
    there.zero_()
    np.testing.assert_array_equal(first, base)
    np.testing.assert_array_equal(second, base[:5])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("count", [0, 1, WINDOW, 2500])
def test_there_and_back(count: int, dtype: type, rng: np.random.Generator) -> None:
    bits = rng.integers(0, 255, count, dtype)
    bits.flags.writeable = False
    there = device.to_device(bits, torch.empty(0))
    assert there.numel() == count
    back = device.to_host(there)
    np.testing.assert_array_equal(back, bits, strict=True)
    assert not np.shares_memory(back, there.numpy())
    device.finish(there)


@pytest.mark.parametrize("units", [range(2500), range(1000, 2500), range(2000, 2300), range(0)])
def test_windows_of_host_and_device_are_alike(base: Bits, units: range) -> None:
    ours = list(device.host_windows(base, units))
    theirs = list(device.host_windows(tensor(base), units))
    assert [start for start, _ in ours] == [start for start, _ in theirs]
    for (_, left), (_, right) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(left, right, strict=True)
        assert np.shares_memory(left, base)
    joined = np.concatenate([base[:0], *(window for _, window in ours)])
    np.testing.assert_array_equal(joined, base[units.start : units.stop])


def test_each_window_is_begun_while_the_one_before_is_used(base: Bits, monkeypatch) -> None:
    begun: list[int] = []
    bring = SideStream.bring
    monkeypatch.setattr(
        SideStream, "bring", lambda self, *some: begun.append(len(some[0])) or bring(self, *some)
    )
    seen = [len(begun) for _ in device.host_windows(tensor(base), range(2500))]
    assert begun == [1000, 1000, 500]
    assert seen == [2, 3, 3]


def test_an_error_waits_for_what_was_begun(base: Bits, monkeypatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(SideStream, "wait", lambda side: waited.append(repr(side)))
    windows = device.host_windows(tensor(base), range(2500))
    next(windows)
    windows.close()
    assert waited == ["SideStream(cpu, at once)"]


def test_changes_are_those_of_each_window_and_the_copy_follows(base: Bits) -> None:
    new = base.copy()
    places = [0, 7, 999, 1000, 2499]
    new[places] ^= 3
    copies = DeviceCopies()
    copy = copies.of(META, base, tensor(new))
    np.testing.assert_array_equal(copy.numpy(), base)
    assert not np.shares_memory(copy.numpy(), base)
    found = dict(device.changes_on_device(copy, tensor(new), range(2500)))
    assert {start: offsets.tolist() for start, (offsets, _, _) in found.items()} == {
        0: [0, 7, 999],
        1000: [0],
        2000: [499],
    }
    for start, (offsets, old_bits, new_bits) in found.items():
        np.testing.assert_array_equal(old_bits, base[start + offsets.astype(np.int64)])
        np.testing.assert_array_equal(new_bits, new[start + offsets.astype(np.int64)])
    assert copies.of(META, base, tensor(new)) is copy
    np.testing.assert_array_equal(copy.numpy(), new)


def test_no_room_on_the_device_is_said_with_the_way_out(base: Bits, monkeypatch) -> None:
    def full(*_: object) -> Iterator[None]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device, "to_device", full)
    with pytest.raises(
        ConfigError,
        match="no room for a copy of the 5000 bytes of tensor 'w'.*leave device_copy out",
    ):
        DeviceCopies().of(META, base, tensor(base))
