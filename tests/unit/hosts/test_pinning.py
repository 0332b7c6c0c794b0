"""Page-locked memory: refused, used and reported; on a GPU never run."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from syncline.errors import TransportError
from syncline.hosts import VersionHost, pinning
from syncline.peers import SharedPeer, TcpPeer


def fake_torch(monkeypatch, *, available: bool, status: int = 0) -> list[int]:
    pinned: list[int] = []

    def register(address, nbytes, flags):
        pinned.append(nbytes)
        return status

    cudart = SimpleNamespace(cudaHostRegister=register)
    cuda = SimpleNamespace(is_available=lambda: available, cudart=lambda: cudart)
    monkeypatch.setattr(pinning, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return pinned


def test_without_a_device_nothing_is_pinned(monkeypatch):
    fake_torch(monkeypatch, available=False)
    assert pinning.pin_if_cuda() is None
    monkeypatch.setattr(pinning, "find_spec", lambda name: None)
    assert pinning.pin_if_cuda() is None


def test_a_host_pins_every_piece_of_its_memory_once(monkeypatch):
    pinned = fake_torch(monkeypatch, available=True)
    host = VersionHost("h0", [SharedPeer()], pin=pinning.pin_if_cuda())
    assert host.allocate(5000).size == 5000
    assert host.allocate(0).size == 0
    assert pinned == [5000]
    host.close()


def test_a_refusal_is_an_error(monkeypatch):
    fake_torch(monkeypatch, available=True, status=2)
    host = VersionHost("h0", [TcpPeer()], pin=pinning.pin_if_cuda())
    with pytest.raises(TransportError, match="error 2"):
        host.allocate(100)
    host.close()


@pytest.mark.gpu
def test_cuda_takes_shared_pages():
    torch = pytest.importorskip("torch")
    host = VersionHost("h0", [SharedPeer()], pin=pinning.pin_if_cuda())
    memory = host.allocate(1 << 20)
    memory[:] = 7
    tensor = torch.from_numpy(memory)
    assert tensor.is_pinned()
    assert int(tensor.to("cuda", non_blocking=True).sum()) == 7 << 20
    assert np.all(memory == 7)
    host.close()
