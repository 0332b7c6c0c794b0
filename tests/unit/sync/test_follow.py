"""Following itself, with layouts and engines that are hard to make on disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime_oracle import assert_holds, engine_of, model, reader, stepped, write_chain, write_full
from syncline import MemoryEngine
from syncline.abc import ignore
from syncline.engines.memory import MemoryEngine as Engine
from syncline.errors import FormatError, TornUpdateError, VerifyError
from syncline.interchange.slime import Slime
from syncline.sync import follow
from syncline.sync.follow import Follower


class InTurn(Slime):
    """A layout whose tensors must be used up one by one."""

    is_concurrent = False

    def read(self, store, version, base):
        open_one = None
        for meta, pieces in super().read(store, version, base):
            assert open_one is None or next(open_one, None) is None, (
                "the one before was not used up"
            )
            open_one = iter(pieces)
            yield meta, open_one


class Twice(Slime):
    """A layout whose reader yields a tensor a second time."""

    def read(self, store, version, base):
        yield from super().read(store, version, base)
        yield next(super().read(store, version, base))


class Changing(Slime):
    """A layout whose directory is rewritten after it was read once: a tensor goes, comes, or is another."""

    def __init__(self, how):
        self.how, self.readings = how, 0

    def read(self, store, version, base):
        self.readings += 1
        found = list(super().read(store, version, base))
        if self.readings == 2:
            meta, pieces = found.pop()
            if self.how == "renamed":
                found.append((replace(meta, name="other"), pieces))
            if self.how == "reshaped":
                found.append((replace(meta, shape=(1, *meta.shape)), pieces))
            if self.how == "repeated":
                found += [(meta, pieces), next(super().read(store, version, base))]
        yield from found


@pytest.fixture
def states(rng):
    states = [model(rng)]
    for _ in range(2):
        states.append(stepped(states[-1], rng))
    return states


def follower(run, engine, layout=None, verify="full", observe=ignore) -> Follower:
    return Follower(reader(run), layout or Slime(), engine, verify=verify, observe=observe)


def test_a_layout_that_must_be_read_in_turn_is(tmp_path, states):
    write_full(tmp_path / "run", "weight_v000000", states[0])
    write_chain(tmp_path / "run", states)
    engine = MemoryEngine()
    follower(tmp_path / "run", engine, InTurn()).sync()
    assert_holds(engine, states[2])


@pytest.mark.parametrize("pooled_bytes", [0, 1 << 30])
def test_tensors_too_large_for_the_pool_are_decoded_one_by_one(
    tmp_path, states, monkeypatch, pooled_bytes
):
    monkeypatch.setattr(follow, "_POOLED_BYTES", pooled_bytes)
    write_chain(tmp_path / "run", states)
    engine = engine_of(states[0])
    report = follower(tmp_path / "run", engine).sync()
    assert_holds(engine, states[2])
    assert report.changed > 0
    assert report.payload_bytes > 0


def test_a_layout_that_yields_a_tensor_twice_is_refused(tmp_path, states):
    write_chain(tmp_path / "run", states)
    engine = engine_of(states[0])
    with pytest.raises(FormatError, match="came twice in one version"):
        follower(tmp_path / "run", engine, Twice()).sync()
    assert_holds(engine, states[0])


def test_progress_ends_at_the_payloads_size(tmp_path, states):
    write_chain(tmp_path / "run", states)
    steps = []
    report = follower(tmp_path / "run", engine_of(states[0]), observe=steps.append).sync()
    assert next(step.name for step in steps) == "pull.planned"
    assert (steps[-1].name, steps[-1].done_bytes) == ("pull.version_applied", report.payload_bytes)
    assert steps[-1].done_bytes == steps[-1].total_bytes > 0


def test_an_engine_that_fails_in_the_second_version_holds_the_first(tmp_path, states):
    class Failing(Engine):
        def apply(self, records, held):
            if self.held() is not None:
                raise TornUpdateError("no more")
            super().apply(records, held)

    write_chain(tmp_path / "run", states)
    engine = engine_of(states[0])
    engine.__class__ = Failing
    with pytest.raises(TornUpdateError):
        follower(tmp_path / "run", engine).sync()
    assert_holds(engine, states[1])
    engine.__class__ = Engine
    assert len(follower(tmp_path / "run", engine).sync().applied) == 1
    assert_holds(engine, states[2])


def test_a_long_run_is_not_read_again_at_every_sync(tmp_path, states):
    run = tmp_path / "run"
    write_chain(run, states)
    store, reads = reader(run), []
    get = store.get

    def counted(key, start=0, stop=None):
        reads.append(key)
        return get(key, start, stop)

    store.get = counted
    following = Follower(store, Slime(), engine_of(states[0]), verify="changed", observe=ignore)
    following.sync()
    reads.clear()
    following.sync()
    assert {key.split("/")[0] for key in reads} == {"weight_v000002", "HEAD.json"}


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("how", ["lost", "renamed", "reshaped", "repeated"])
def test_a_full_version_with_other_tensors_at_the_second_reading(
    tmp_path, states, how, has_weights
):
    write_full(tmp_path / "run", "weight_v000007", states[1])
    engine = engine_of(states[0]) if has_weights else MemoryEngine()
    with pytest.raises(VerifyError, match="changed while it was read"):
        follower(tmp_path / "run", engine, Changing(how)).sync()
    assert engine.held() is None
    assert_holds(engine, states[0] if has_weights else {})
    follower(tmp_path / "run", engine).sync()
    assert_holds(engine, states[1])
