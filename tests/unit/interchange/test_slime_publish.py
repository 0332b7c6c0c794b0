"""A publisher whose versions slime-family readers take, and the failures that it must not cause."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from slime_oracle import (
    COMBINATIONS,
    INDEX,
    apply_delta,
    assert_holds,
    model,
    reader,
    stepped,
    write_chain,
)
from syncline import CheckpointSource, MemoryEngine, MemoryStore, Publisher, Receiver, interchange
from syncline.abc import WeightSource, ignore
from syncline.errors import (
    CodecError,
    ConfigError,
    ForeignDirectoryError,
    LayoutError,
    VersionConflictError,
)
from syncline.stores import open_store
from syncline.sync.fsck import check_store
from syncline.sync.options import PublisherOptions
from syncline.types import TensorMeta, unsigned


@pytest.mark.parametrize(("encoding", "checksum"), COMBINATIONS)
def test_slime_readers_and_our_own_take_the_same_versions(tmp_path, rng, encoding, checksum):
    store = open_store(tmp_path / "run")
    publisher = Publisher(
        store, layout="slime", encoding=encoding, checksum=checksum, part_bytes=2000
    )
    states = [model(rng)]
    publisher.publish(states[0])
    for _ in range(3):
        states.append(stepped(states[-1], rng))
        publisher.publish(states[-1])
    held = dict(states[0])
    for number in (2, 3, 4):
        held = apply_delta(tmp_path / "run" / f"weight_v{number:06d}", held)
        assert all(held[name].tobytes() == states[number - 1][name].tobytes() for name in held)
    ours, theirs = MemoryEngine(), MemoryEngine()
    assert Receiver(store, ours).sync().layout == "syncline"
    report = Receiver(store, theirs, layout="slime", verify="full").sync()
    assert (report.layout, report.identity) == ("slime", "000004")
    assert_holds(ours, states[3])
    assert_holds(theirs, states[3])
    assert check_store(store, deep=True, observe=ignore) == (4, [])


def test_the_first_version_is_a_checkpoint_that_any_loader_opens(tmp_path, rng):
    weights = model(rng)
    Publisher(open_store(tmp_path / "run"), layout="slime").publish(weights)
    first = tmp_path / "run" / "weight_v000001"
    assert CheckpointSource(first).metas().keys() == weights.keys()
    found = load_file(first / "model-00000-of-00001.safetensors")
    assert all(found[name].tobytes() == weights[name].tobytes() for name in weights)


def test_a_delta_that_changes_nothing_can_be_followed(tmp_path, rng):
    store, weights = open_store(tmp_path / "run"), model(rng)
    publisher = Publisher(store, layout="slime")
    publisher.publish(weights)
    publisher.publish(weights)
    engine = MemoryEngine()
    assert Receiver(store, engine, layout="slime").sync().identity == "000002"
    assert_holds(engine, weights)


def test_an_anchor_resets_the_chain_for_them_too(tmp_path, rng):
    store = open_store(tmp_path / "run")
    publisher = Publisher(store, layout="slime", anchor_every=1)
    states = [model(rng)]
    publisher.publish(states[0])
    early = MemoryEngine()
    receiver = Receiver(store, early, layout="slime")
    receiver.sync()
    for _ in range(2):
        states.append(stepped(states[-1], rng))
        assert publisher.publish(states[-1]).anchor is not None
    assert receiver.sync().identity == "000005"
    assert_holds(early, states[2])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layout": "slimy"}, "layout: expected 'syncline' or 'slime', found 'slimy'"),
        ({"layout": "slime", "encoding": "tight"}, "expected encoding 'xor' or 'overwrite'"),
        (
            {"layout": "slime", "full_encoding": "planes"},
            "full_encoding 'full', found 'xor' and 'planes'",
        ),
        ({"layout": "slime", "checksum": "md5"}, "checksum must be one of"),
        (
            {"checksum": "adler32"},
            "with encoding 'xor' or 'overwrite' alone, found encoding 'auto'",
        ),
    ],
)
def test_settings_that_no_reader_could_follow(options, match):
    store = MemoryStore()
    with pytest.raises(ConfigError, match=match):
        Publisher(store, **options)
    assert store.list() == []


@pytest.mark.parametrize("options", [{"encoding": "auto"}, {"full_encoding": "planes"}])
def test_a_run_with_versions_that_slime_readers_cannot_take_is_not_carried_on(rng, options):
    store, weights = MemoryStore(), model(rng)
    before = Publisher(store, **options)
    before.publish(weights)
    before.publish(stepped(weights, rng))
    with pytest.raises(ConfigError, match="cannot take; begin a run in another directory"):
        Publisher(store, layout="slime")
    before.publish(weights)  # nothing was taken over


def test_a_run_of_xor_versions_is_carried_on_for_slime_readers(rng):
    store, weights = MemoryStore(), model(rng)
    Publisher(store, encoding="xor").publish(weights)
    after = stepped(weights, rng)
    assert Publisher(store, layout="slime", encoding="overwrite").publish(after).version == 2
    engine = MemoryEngine()
    Receiver(store, engine, layout="slime").sync()
    assert_holds(engine, after)


def test_auto_means_xor_for_slime_readers():
    assert PublisherOptions(layout="slime").encoding == "xor"
    assert PublisherOptions().encoding == "auto"


def test_positions_that_would_wrap_are_refused_before_the_first_version_is_written():
    large = TensorMeta("embed", "BF16", (1 << 16, 1 << 15))
    with pytest.raises(CodecError, match="'embed' has 4294967296 bytes.*encoding='xor'"):
        PublisherOptions(layout="slime", encoding="overwrite").check([large])
    assert PublisherOptions(layout="slime", encoding="xor").check([large]) is None
    assert PublisherOptions(encoding="auto").check([large]) is None


def test_a_restarted_trainer_counts_on_and_never_writes_a_number_twice(tmp_path, rng):
    store, weights = open_store(tmp_path / "run"), model(rng)
    first = Publisher(store, layout="slime")
    first.publish(weights)
    weights = stepped(weights, rng)
    first.publish(weights)
    before = {info.key: store.get(info.key) for info in store.list("weight_v")}
    second = Publisher(store, layout="slime")
    weights = stepped(weights, rng)
    assert second.publish(weights).version == 3
    assert all(store.get(key) == content for key, content in before.items())
    with pytest.raises(VersionConflictError, match="another publisher has taken the store over"):
        first.publish(weights)
    engine = MemoryEngine()
    Receiver(store, engine, layout="slime").sync()
    assert_holds(engine, weights)


def test_the_index_comes_after_its_parts_and_before_the_manifest(rng):
    class Watched(MemoryStore):
        def __init__(self):
            super().__init__()
            self.order = []

        def put(self, key, chunks):
            super().put(key, chunks)
            self.order.append(key.partition("/")[2])

    store = Watched()
    Publisher(store, layout="slime", part_bytes=1500).publish(model(rng))
    parts = [name for name in store.order if name.endswith(".safetensors")]
    assert len(parts) > 1
    assert store.order == [*parts, INDEX, "manifest.json"]


def test_a_name_published_twice_and_a_name_that_the_base_lacks(rng):
    publisher, weights = Publisher(MemoryStore(), layout="slime"), model(rng)
    publisher.publish(weights)
    with pytest.raises(LayoutError, match="'norm' came twice"):
        publisher.publish([*weights.items(), ("norm", weights["norm"])])
    with pytest.raises(LayoutError, match="'lm_head.weight' is not in the base"):
        publisher.publish({**weights, "lm_head.weight": weights["embed.weight"]})
    assert publisher.version == 1


def test_somebody_elses_run_is_left_alone(tmp_path, rng):
    states = [model(rng)]
    states.append(stepped(states[0], rng))
    write_chain(tmp_path / "run", states)
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(ForeignDirectoryError, match="nothing was touched"):
        Publisher(reader(tmp_path / "run"), layout="slime").publish(states[0])
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


def test_our_own_run_is_recognised_as_ours(tmp_path, rng):
    store = open_store(tmp_path / "run")
    Publisher(store, layout="slime").publish(model(rng))
    assert interchange.recognise(store) == interchange.SYNCLINE


def test_a_checksum_that_needs_a_missing_package_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ConfigError, match=r"pip install 'syncline\[interchange\]'"):
        PublisherOptions(layout="slime", checksum="blake3")


class BitsSource(WeightSource):
    """Weights as metas and bits, for dtypes that numpy has no name for."""

    def __init__(self, weights) -> None:
        self._weights = weights

    def tensors(self):
        yield from self._weights.values()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_every_bit_pattern_of_every_dtype_goes_through(tmp_path, every_dtype, rng, encoding):
    store = open_store(tmp_path / "run")
    publisher = Publisher(store, layout="slime", encoding=encoding, checksum="blake3")
    publisher.publish(BitsSource(every_dtype))
    flipped = {
        name: (meta, rng.integers(0, 256, meta.nbytes, np.uint8).view(unsigned(meta.unit_bytes)))
        for name, (meta, _) in every_dtype.items()
    }
    publisher.publish(BitsSource(flipped))
    engine = MemoryEngine()
    Receiver(store, engine, layout="slime", verify="full").sync()
    assert engine.tensors() == {name: meta for name, (meta, _) in every_dtype.items()}
    for name, (_, bits) in flipped.items():
        assert engine.view(name).tobytes() == bits.tobytes()
