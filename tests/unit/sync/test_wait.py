"""An engine that starts before its trainer waits for the first version, and says where it found none."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from syncline import FilesystemStore, MemoryEngine, MemoryStore, Publisher, Receiver, open_store
from syncline.errors import ForeignDirectoryError, StoreError, TransportTimeoutError

WEIGHTS = {"w": np.arange(6, dtype=np.float32)}


def test_waits_for_the_first_version() -> None:
    store, engine = MemoryStore(), MemoryEngine()
    receiver = Receiver(store, engine)
    publisher = Publisher(store)  # begins a run, without a version
    with pytest.raises(TransportTimeoutError, match="memory store.*a run without a version"):
        receiver.wait(0)
    publishing = threading.Thread(target=publisher.publish, args=(WEIGHTS,))
    publishing.start()
    receiver.wait(60, poll_s=0.01)
    assert receiver.sync().version == 1
    publishing.join()


def test_a_directory_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    with pytest.raises(TransportTimeoutError, match=f"{tmp_path}/run.*no HEAD.json"):
        Receiver(store, MemoryEngine()).wait(0)
    Publisher(FilesystemStore(tmp_path / "run")).publish(WEIGHTS)
    Receiver(store, MemoryEngine()).wait(0)


def test_a_foreign_version_that_is_only_begun_is_waited_for() -> None:
    store = MemoryStore()
    store.put("weight_v000001/what.is.this", [b"?"])
    with pytest.raises(TransportTimeoutError, match="memory store"):
        Receiver(store, MemoryEngine()).wait(0.02, poll_s=0.01)


def test_a_sync_from_a_store_without_a_run_names_the_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"no HEAD.json in {tmp_path}/nothing"):
        Receiver(open_store(tmp_path / "nothing"), MemoryEngine()).sync()
    store = MemoryStore()
    store.put("theirs", [b"x"])
    with pytest.raises(ForeignDirectoryError, match="a memory store holds 'theirs'"):
        Publisher(store)
