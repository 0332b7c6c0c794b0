"""An engine believes nothing of what a trainer says on a live path that it has not checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from syncline import MemoryChannel, MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.channels import MemoryInlet, MemoryOutlet
from syncline.errors import FormatError, SynclineError, TransportTimeoutError, VerifyError
from syncline.format import cargo as cargo_format
from syncline.format.bucket import pack
from syncline.sync.live import messages

WAIT_S = 20.0
WEIGHTS = {"a": np.arange(10, dtype=np.float32), "b": np.ones(3, np.uint8)}


@pytest.fixture
def trainer() -> Iterator[tuple[Publisher, MemoryOutlet, MemoryInlet]]:
    outlet = MemoryOutlet()
    inlet = MemoryInlet(outlet, name="engine", timeout_s=WAIT_S)
    inlet.channel()
    yield Publisher(MemoryStore(), live=outlet, live_timeout_s=WAIT_S), outlet, inlet
    inlet.close()
    outlet.close()


def spoiled(monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., None]) -> None:
    """Let a trainer's messages be changed on their way."""
    real = messages.send

    def send(
        channel: Any, kind: str, generation: int, fields: Any, blobs: Any = (), **more: Any
    ) -> None:
        fields, blobs = dict(fields), list(blobs)
        spoil(kind, fields, blobs)
        real(channel, kind, generation, fields, blobs, **more)

    monkeypatch.setattr(messages, "send", send)


def refused(trainer: Any, wanted: type[SynclineError], words: str) -> None:
    """Publish; the engine must refuse with this error, tell the trainer, and stay empty."""
    publisher, _, inlet = trainer
    engine = MemoryEngine()
    with ThreadPoolExecutor() as pool:
        found = pool.submit(Receiver(inlet, engine).sync)
        report = publisher.publish(WEIGHTS)
        with pytest.raises(wanted, match=words):
            found.result(WAIT_S)
    assert set(report.delivery.missed) == {"engine"}
    assert engine.held() is None
    assert not engine.tensors()


def test_a_manifest_that_is_not_the_one_named(trainer, monkeypatch):
    def spoil(kind: str, fields: Any, blobs: Any) -> None:
        if kind == messages.OFFER:
            blobs[0] = blobs[0].replace(b'"epoch":1', b'"epoch":2')

    spoiled(monkeypatch, spoil)
    refused(trainer, VerifyError, "the offered manifest: expected sha256")


def test_an_offer_without_its_manifest(trainer, monkeypatch):
    def spoil(kind: str, fields: Any, blobs: Any) -> None:
        if kind == messages.OFFER:
            blobs.clear()

    spoiled(monkeypatch, spoil)
    refused(trainer, FormatError, "came with 0 files")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "cargo: expected"),
        ({"run_id": "0" * 32}, "cargo: expected"),
        ({"manifest_sha256": "0" * 64}, "cargo: expected"),
        ({"generation": 99}, "cargo: expected"),
        ({"buckets": ()}, "its tensors are not those of the version"),
        ({"buckets": "less"}, "its tensors are not those of the version"),
    ],
)
def test_buckets_that_are_not_the_versions(trainer, monkeypatch, change, words):
    def spoil(kind: str, fields: Any, blobs: Any) -> None:
        if kind == messages.LOAD:
            cargo = cargo_format.load(blobs[0])
            if change.get("buckets") == "less":
                metas = [meta for meta in cargo.metas.values() if meta.name == "a"]
                blobs[0] = cargo_format.dump(replace(cargo, buckets=pack(metas, 4096)))
            else:
                blobs[0] = cargo_format.dump(replace(cargo, **change))

    spoiled(monkeypatch, spoil)
    refused(trainer, FormatError, words)


def test_files_that_are_not_the_digested_ones(trainer, monkeypatch):
    def spoil(kind: str, fields: Any, blobs: Any) -> None:
        if kind == messages.LOAD:
            fields["files"] = [{"path": "config.json", "size_bytes": 2, "sha256": "0" * 64}]
            blobs.append(b"{}")

    spoiled(monkeypatch, spoil)
    refused(trainer, VerifyError, "config.json")


def test_files_that_would_leave_the_directory(trainer, monkeypatch):
    def spoil(kind: str, fields: Any, blobs: Any) -> None:
        if kind == messages.LOAD:
            fields["files"] = [{"path": "../x", "size_bytes": 2, "sha256": "0" * 64}]
            blobs.append(b"{}")

    spoiled(monkeypatch, spoil)
    refused(trainer, FormatError, "one plain file name")


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (messages.ANSWER, {"wants": 3}),
        (messages.ANSWER, {"wants": "everything"}),
        (messages.VOTE, {"error": 3}),
        (messages.DONE, {"error": 3}),
    ],
)
def test_an_engine_that_talks_nonsense_is_left_out_and_the_rest_is_served(
    trainer, monkeypatch, kind, wrong
):
    """What it said was raised from publish, and nobody else got the version."""
    publisher, outlet, inlet = trainer
    other = MemoryInlet(outlet, name="other", timeout_s=WAIT_S)
    other.channel()
    bad, real = inlet.channel(), messages.send

    def send(channel: Any, sent: str, generation: int, fields: Any, blobs: Any = (), **more: Any):
        if channel is bad and sent == kind:
            fields = {**fields, **wrong}
        real(channel, sent, generation, fields, blobs, **more)

    monkeypatch.setattr(messages, "send", send)
    engines = [MemoryEngine(), MemoryEngine()]
    with ThreadPoolExecutor() as pool:
        found = [
            pool.submit(Receiver(each, engine).sync)
            for each, engine in zip((inlet, other), engines, strict=True)
        ]
        report = publisher.publish(WEIGHTS)
        assert found[1].exception(WAIT_S) is None
        found[0].exception(WAIT_S)
    assert set(report.delivery.missed) == {"engine"}
    assert report.delivery.committed == ("other",)
    other.close()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\x80\x04N.", "not UTF-8"),
        (b"[]", "must be an object"),
        (b'{"message":"run"}', "message must be one of"),
        (b'{"message":"offer","generation":0,"blobs":0}', "is missing"),
        (
            b'{"message":"verdict","generation":0,"blobs":70000,"error":null,"again":false}',
            "from 0 to 65536",
        ),
        (
            b'{"message":"verdict","generation":-1,"blobs":0,"error":null,"again":false}',
            "generation must be",
        ),
        (
            b'{"message":"verdict","generation":0,"blobs":0,"error":null,"again":false,"x":1}',
            "not a known key",
        ),
    ],
)
def test_what_is_no_message_is_refused(raw, words):
    one, other = MemoryChannel.pair()
    one.send(raw)
    with pytest.raises(FormatError, match=words):
        messages.receive(other, (messages.OFFER,), None, WAIT_S)


@pytest.mark.parametrize(
    ("lanes", "sources"),
    [(["there"], []), ([], [0]), (["there"], [2, 0]), (["there"], [0]), (["there"], [0, 0, 1])],
)
def test_senders_that_are_not_one_for_each_bucket_are_refused(trainer, monkeypatch, lanes, sources):
    def spoil(kind: str, fields: Any, blobs: Any) -> None:
        if kind == messages.LOAD:
            fields |= {"lanes": lanes, "sources": sources}

    spoiled(monkeypatch, spoil)
    refused(trainer, FormatError, "sources must be")


def test_what_belongs_to_an_attempt_that_was_given_up_is_dropped():
    one, other = MemoryChannel.pair()
    messages.send(one, messages.VOTE, 1, {"error": "late", "is_own": False})
    one.send(json.dumps({"opened": 3}).encode())
    load = {"kind": "full", "files": [], "lanes": [], "sources": [], "join_ms": 500}
    messages.send(one, messages.LOAD, 1, load, [b"raw bytes", b"{"])
    messages.send(one, messages.VOTE, 2, {"error": None, "is_own": False})
    found = messages.receive(other, (messages.VOTE,), 2, WAIT_S)
    assert (found.generation, found.fields["error"]) == (2, None)
    with pytest.raises(TransportTimeoutError):
        messages.receive(other, (messages.VOTE,), 2, 0.01)
