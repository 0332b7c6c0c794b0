"""A publisher and its engines over every live path: the same versions as from the store, on all of them or none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from live_paths import PATHS, WAIT_S, MakeInlet, live_path
from syncline import CheckpointDir, MemoryEngine, MemoryStore, Publisher, Receiver, TensorMeta
from syncline.abc import Engine, Inlet, Outlet
from syncline.channels import SharedMemoryOutlet
from syncline.errors import (
    BaseVersionError,
    CommitError,
    ConfigError,
    LayoutError,
    PeerLostError,
    TransportTimeoutError,
    VerifyError,
)
from syncline.sync.accounting import PHASES
from syncline.sync.reports import AppliedVersion, PublishReport

Path = tuple[Outlet, MakeInlet]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    with live_path(request.param) as made:
        yield made


def weights(every_dtype: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return arrays of what numpy has a dtype for, cut, uncut and empty ones among them."""
    made = {
        "norm": np.ones(7, np.float16),
        "empty": np.empty((0, 5), np.float32),
        "scalar": np.array(2.5),
        "long": np.arange(3000, dtype=np.int64),
        "bytes": np.arange(256, dtype=np.uint8),
        "nan": np.array([np.nan, -0.0, 1.0], np.float32),
    }
    for name, (meta, bits) in every_dtype.items():
        if meta.dtype in ("U16", "U32", "U64", "U8"):
            made[name] = bits.reshape(meta.shape)
    return made


@pytest.fixture
def model(every_dtype: dict[str, Any]) -> dict[str, np.ndarray]:
    return weights(every_dtype)


def train(model: dict[str, np.ndarray], step: int) -> None:
    for array in model.values():
        flat = array.reshape(-1).view(np.uint8)
        flat[step % max(1, flat.size) :: 97] ^= 1


def joined(outlet: Outlet, *inlets: Inlet) -> None:
    for inlet in inlets:
        inlet.channel()
    deadline_s = time.monotonic() + WAIT_S
    while len(outlet.members()) < len(inlets):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def publish_to(
    publisher: Publisher, model: dict[str, np.ndarray], *receivers: Receiver, **options: Any
) -> tuple[PublishReport, list[Future[AppliedVersion]]]:
    """Publish while every receiver waits; return the report, and what became of each."""
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(receiver.sync) for receiver in receivers]
        return publisher.publish(model, **options), waiting


def same(engine: Engine, model: dict[str, np.ndarray]) -> bool:
    return all(
        np.array_equal(
            np.asarray(engine.view(name)).view(np.uint8), array.reshape(-1).view(np.uint8)
        )
        for name, array in model.items()
    )


@pytest.mark.parametrize("encoding", ["auto", "indices"])
def test_every_version_arrives_bit_for_bit(path, model, encoding):
    outlet, make = path
    engines = [MemoryEngine(), MemoryEngine()]
    inlets = [make(name) for name in ("a", "b")]
    receivers = [
        Receiver(inlet, engine, verify="full")
        for inlet, engine in zip(inlets, engines, strict=True)
    ]
    store = MemoryStore()
    publisher = Publisher(
        store, live=outlet, encoding=encoding, bucket_bytes=1024, live_timeout_s=WAIT_S
    )
    joined(outlet, *inlets)
    for step in range(4):
        report, waiting = publish_to(publisher, model, *receivers)
        assert report.delivery.committed == ("a", "b") or report.delivery.committed == ("b", "a")
        assert report.delivery.missed == {}
        report.delivery.require()
        for engine, found in zip(engines, waiting, strict=True):
            applied = found.result()
            assert applied.version == step + 1
            assert applied.manifest_sha256 == report.manifest_sha256
            assert engine.held().sha256 == report.manifest_sha256
            assert same(engine, model)
        expected = "delta" if step and "delta" in outlet.kinds else "full"
        assert report.delivery.moved.kind == applied.moved.kind == expected
        train(model, step)


def test_an_empty_tensor_behind_one_that_was_cut_keeps_its_place(path):
    """It was told before the last piece of the one that was cut, whose fingerprint was then called wrong."""
    outlet, make = path
    engine, inlet = MemoryEngine(), make("a")
    receiver = Receiver(inlet, engine, verify="full")
    publisher = Publisher(
        MemoryStore(), live=outlet, bucket_bytes=1024, live_kind="full", live_timeout_s=WAIT_S
    )
    joined(outlet, inlet)
    model = {
        "a": np.arange(1000, dtype=np.float32),
        "b": np.empty((0, 3), np.float32),
        "c": np.ones(3, np.float32),
    }
    for step in range(2):  # into an engine that is empty, then into one that is not
        report, (found,) = publish_to(publisher, model, receiver)
        report.delivery.require()
        assert found.result().version == step + 1
        assert same(engine, model)
        model["a"] += 1


def test_phases_bytes_and_overlap_are_told(path, model):
    outlet, make = path
    inlet = make("a")
    publisher = Publisher(MemoryStore(), live=outlet, live_timeout_s=WAIT_S)
    joined(outlet, inlet)
    report, (found,) = publish_to(publisher, model, Receiver(inlet, MemoryEngine()))
    sent, came = report.delivery.moved, found.result().moved
    total_bytes = sum(array.nbytes for array in model.values())
    assert sent.model_bytes == came.model_bytes == total_bytes
    assert total_bytes <= sent.wire_bytes == came.wire_bytes
    for moved in (sent, came):
        assert set(moved.seconds) == set(PHASES)
        assert moved.seconds["wire"] > 0
        assert moved.overlap_s >= 0
        assert moved.as_dict()["share"] == moved.share >= 1
    assert came.seconds["apply"] > 0
    assert came.seconds["decode"] > 0


def test_an_engine_changes_from_store_to_live_path_and_back(path, model):
    outlet, make = path
    store, engine, inlet = MemoryStore(), MemoryEngine(), make("a")
    publisher = Publisher(store, live=outlet, live_timeout_s=WAIT_S)
    live, stored = Receiver(inlet, engine, verify="full"), Receiver(store, engine, verify="full")
    publisher.publish(model)
    assert stored.sync().version == 1
    joined(outlet, inlet)
    train(model, 1)
    report, (found,) = publish_to(publisher, model, live)
    assert found.result().applied == (2,)
    if "delta" in outlet.kinds:
        assert report.delivery.moved.kind == "delta"
    inlet.close()
    assert stored.sync().applied == ()
    train(model, 2)
    publisher.publish(model)
    assert stored.sync().applied == (3,)
    train(model, 3)
    joined(outlet, inlet)
    _, (found,) = publish_to(publisher, model, live)
    assert found.result().version == 4
    assert same(engine, model)


def test_a_joiner_gets_all_weights_and_nobody_else_does(path, model):
    outlet, make = path
    store = MemoryStore()
    old, new = MemoryEngine(), MemoryEngine()
    publisher = Publisher(store, live=outlet, bucket_bytes=512, live_timeout_s=WAIT_S)
    first = make("old")
    joined(outlet, first)
    receivers = [Receiver(first, old)]
    publish_to(publisher, model, *receivers)
    second = make("new")
    joined(outlet, first, second)
    receivers.append(Receiver(second, new, verify="full"))
    train(model, 1)
    report, (of_old, of_new) = publish_to(publisher, model, *receivers)
    assert set(report.delivery.committed) == {"old", "new"}
    assert of_new.result().moved.kind == "full"
    assert of_old.result().moved.kind == ("delta" if "delta" in outlet.kinds else "full")
    assert same(old, model)
    assert same(new, model)


def test_an_anchor_moves_nothing(path, model):
    outlet, make = path
    inlet, engine = make("a"), MemoryEngine()
    publisher = Publisher(MemoryStore(), live=outlet, anchor_every=1, live_timeout_s=WAIT_S)
    joined(outlet, inlet)
    receiver = Receiver(inlet, engine)
    publish_to(publisher, model, receiver)
    train(model, 1)
    with ThreadPoolExecutor() as pool:
        both = pool.submit(lambda: (receiver.sync(), receiver.sync()))
        report = publisher.publish(model)
        delta, anchor = both.result(WAIT_S)
    assert (delta.version, anchor.version, report.anchor) == (2, 3, 3)
    assert anchor.payload_bytes == 0
    assert same(engine, model)


def test_a_checkpoint_directory_takes_versions_too(path, model, tmp_path):
    outlet, make = path
    publisher = Publisher(MemoryStore(), live=outlet, bucket_bytes=768, live_timeout_s=WAIT_S)
    inlet = make("a")
    joined(outlet, inlet)
    for step in range(3):
        engine = CheckpointDir(tmp_path / "checkpoint")
        _, (found,) = publish_to(publisher, model, Receiver(inlet, engine, verify="full"))
        assert found.result().version == step + 1
        assert same(engine, model)
        train(model, step)


class _Refusing(MemoryEngine):
    """An engine that cannot take a version when it comes to it."""

    def apply(self, records: Any, held: Any) -> None:
        for _ in records:
            raise VerifyError("this memory is faulty")
        super().apply((), held)


def test_an_engine_that_refuses_keeps_all_from_committing(path, model):
    outlet, make = path
    good, bad = MemoryEngine(), _Refusing()
    inlets = [make("good"), make("bad")]
    publisher = Publisher(MemoryStore(), live=outlet, live_timeout_s=WAIT_S)
    joined(outlet, *inlets)
    receivers = [Receiver(inlets[0], good), Receiver(inlets[1], bad)]
    publish_to(publisher, model, *receivers)
    before = {name: array.copy() for name, array in model.items()}
    train(model, 1)
    report, (of_good, of_bad) = publish_to(publisher, model, *receivers)
    assert report.delivery.committed == ()
    assert set(report.delivery.missed) == {"good", "bad"}
    assert "faulty" in report.delivery.missed["bad"]
    with pytest.raises(PeerLostError, match="'bad': this memory is faulty"):
        report.delivery.require()
    with pytest.raises(CommitError, match="'bad'"):
        of_good.result()
    with pytest.raises(VerifyError, match="faulty"):
        of_bad.result()
    for engine in (good, bad):
        assert engine.held().version == 1
        assert same(engine, before)
    inlets[1].close()
    train(model, 2)
    report, (of_good,) = publish_to(publisher, model, receivers[0])
    assert report.delivery.committed == ("good",)
    assert same(good, model)


class _Other(MemoryEngine):
    """An engine that sees before the round begins that it cannot take the version."""

    def tensors(self) -> Any:
        return {"other": TensorMeta("other", "U8", (1,))}


def test_an_engine_with_other_tensors_holds_nobody_up(path, model):
    outlet, make = path
    inlets = [make("good"), make("bad")]
    publisher = Publisher(MemoryStore(), live=outlet, live_timeout_s=10 * WAIT_S)
    joined(outlet, *inlets)
    good = MemoryEngine()
    report, (of_good, of_bad) = publish_to(
        publisher, model, Receiver(inlets[0], good), Receiver(inlets[1], _Other())
    )
    assert "tensors are not those" in report.delivery.missed["bad"]
    with pytest.raises(LayoutError):
        of_bad.result()
    with pytest.raises(CommitError, match="tensors are not those"):
        of_good.result()
    assert good.held() is None


class _Sealed(MemoryEngine):
    """An engine that refuses before the first bucket."""

    def create(self, held: Any, spans: Any, files: Any) -> None:
        raise LayoutError("this engine takes no tensors")


def test_an_engine_that_refuses_before_the_first_bucket_holds_nobody_up(path, model):
    outlet, make = path
    inlets = [make("good"), make("bad")]
    publisher = Publisher(MemoryStore(), live=outlet, live_timeout_s=2 * WAIT_S)
    joined(outlet, *inlets)
    good = MemoryEngine()
    report, (of_good, of_bad) = publish_to(
        publisher, model, Receiver(inlets[0], good), Receiver(inlets[1], _Sealed())
    )
    assert report.delivery.missed["bad"] == "this engine takes no tensors"
    with pytest.raises(LayoutError):
        of_bad.result()
    with pytest.raises(CommitError, match="takes no tensors"):
        of_good.result()
    assert good.held() is None
    assert not good.tensors()


def test_an_engine_whose_bits_are_not_the_base_is_refused_and_repaired(path, model):
    outlet, make = path
    engine, inlet = MemoryEngine(), make("a")
    publisher = Publisher(MemoryStore(), live=outlet, live_timeout_s=WAIT_S)
    joined(outlet, inlet)
    receiver = Receiver(inlet, engine, verify="full")
    publish_to(publisher, model, receiver)
    engine.bits("long")[5] ^= 1
    train(model, 1)
    report, (found,) = publish_to(publisher, model, receiver)
    if "delta" in outlet.kinds:
        assert set(report.delivery.missed) == {"a"}
        with pytest.raises(VerifyError, match="long"):
            found.result()
        train(model, 2)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(lambda: receiver.sync(repair=True))
            publisher.publish(model)
            assert waiting.result(WAIT_S).moved.kind == "full"
    assert same(engine, model)


def test_an_engine_of_another_run_is_refused_and_named(path, model):
    outlet, make = path
    engine, inlet, store = MemoryEngine(), make("stray"), MemoryStore()
    Publisher(store).publish(model)
    Receiver(store, engine).sync()
    publisher = Publisher(MemoryStore(), live=outlet, live_timeout_s=WAIT_S)
    joined(outlet, inlet)
    report, (found,) = publish_to(publisher, model, Receiver(inlet, engine))
    assert "follows run" in report.delivery.missed["stray"]
    with pytest.raises(BaseVersionError, match="repair"):
        found.result()


def test_an_engine_that_does_not_answer_is_named_and_let_go(path, model):
    outlet, make = path
    publisher = Publisher(MemoryStore(), live=outlet, live_timeout_s=0.5)
    silent, engine, inlet = make("silent"), MemoryEngine(), make("awake")
    joined(outlet, silent, inlet)
    report, (found,) = publish_to(publisher, model, Receiver(inlet, engine))
    assert report.delivery.committed == ("awake",)
    assert "'silent'" in report.delivery.missed["silent"] or report.delivery.missed["silent"]
    assert found.result().version == 1
    assert list(outlet.members()) == ["awake"]


def test_a_publisher_without_engines_goes_on(path, model):
    outlet, _ = path
    report = Publisher(MemoryStore(), live=outlet).publish(model)
    assert report.delivery.committed == ()
    assert report.delivery.missed == {}


def test_no_version_in_time_leaves_the_engine_as_it_was(path):
    outlet, make = path
    inlet = make("a")
    joined(outlet, inlet)
    inlet.timeout_s = 0.2
    with pytest.raises(TransportTimeoutError):
        Receiver(inlet, MemoryEngine()).sync()
    with pytest.raises(ConfigError, match="version"):
        Receiver(inlet, MemoryEngine()).sync(3)


def test_colocated_and_delta_is_refused_with_the_reason():
    with live_path("shared-memory") as (outlet, _):
        assert isinstance(outlet, SharedMemoryOutlet)
        with pytest.raises(ConfigError, match="nothing is saved"):
            Publisher(MemoryStore(), live=outlet, live_kind="delta")


@pytest.mark.parametrize("kind", [kind for kind in PATHS if kind != "shared-memory"])
def test_only_deltas_are_refused_by_who_has_no_base(kind, model):
    with live_path(kind) as (outlet, make):
        publisher = Publisher(MemoryStore(), live=outlet, live_kind="delta", live_timeout_s=WAIT_S)
        inlet = make("a")
        publisher.publish(model)
        joined(outlet, inlet)
        train(model, 1)
        report, (found,) = publish_to(publisher, model, Receiver(inlet, MemoryEngine()))
        assert "alone" in report.delivery.missed["a"]
        with pytest.raises(BaseVersionError, match="from version 1 alone"):
            found.result()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"live_kind": "some"}, "'auto', 'full' or 'delta'"),
        ({"bucket_bytes": 1000}, "multiple of 256"),
        ({"live_timeout_s": 0.0}, "above 0"),
    ],
)
def test_settings_are_checked(options, words):
    with pytest.raises(ConfigError, match=words):
        Publisher(MemoryStore(), **options)


def test_what_is_no_live_path_is_refused():
    with pytest.raises(ConfigError, match="SharedMemoryOutlet"):
        Publisher(MemoryStore(), live=MemoryStore())


def test_wrong_bytes_on_the_way_are_found(model, monkeypatch):
    from syncline.channels import memory_path

    with live_path("memory") as (outlet, make):
        inlet, engine = make("a"), MemoryEngine()
        publisher = Publisher(MemoryStore(), live=outlet, live_timeout_s=WAIT_S)
        joined(outlet, inlet)
        receiver = Receiver(inlet, engine)
        publish_to(publisher, model, receiver)
        before = {name: array.copy() for name, array in model.items()}
        real = memory_path.fill

        def flip(buffer: Any, pieces: Any) -> None:
            real(buffer, pieces)
            buffer[pieces[-1][0]] ^= 1

        monkeypatch.setattr(memory_path, "fill", flip)
        train(model, 1)
        report, (found,) = publish_to(publisher, model, receiver, full=True)
        assert set(report.delivery.missed) == {"a"}
        with pytest.raises(VerifyError):
            found.result()
        assert same(engine, before)
        assert engine.held().version == 1


def test_a_waiting_engine_hears_that_the_trainer_is_gone(path):
    outlet, make = path
    inlet = make("a")
    joined(outlet, inlet)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(Receiver(inlet, MemoryEngine()).sync)
        threading.Timer(0.1, outlet.close).start()
        with pytest.raises(PeerLostError):
            found.result(WAIT_S)
