"""Channels between ranks whose store is gone."""

from __future__ import annotations

from datetime import timedelta

import pytest

from syncline.errors import PeerLostError

torch = pytest.importorskip("torch", reason="the store is torch's")


def test_a_channel_whose_store_is_gone_closes_quietly() -> None:
    from torch.distributed import TCPStore

    from syncline.channels.torch_ranks import TorchChannel

    wait = timedelta(seconds=5)
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
    seen = TCPStore("127.0.0.1", kept.port, is_master=False, timeout=wait)
    channel = TorchChannel(seen, None, 1, 0, 5.0)
    channel.send(b"before")
    del kept
    with pytest.raises(PeerLostError):
        channel.send(b"after")
    channel.close()
    channel.close()
