"""Any one byte of a slime-layout delta may be wrong: it is refused, or it makes no difference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile import edited, edited_json
from slime_oracle import COMBINATIONS, engine_of, model, raw, stepped, write_chain
from syncline import Receiver
from syncline.errors import SynclineError
from syncline.stores import MemoryStore


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """For every encoding and checksum: the objects of a run, and the weights of its versions."""
    rng = np.random.default_rng(11)
    states = [model(rng)]
    for _ in range(2):
        states.append(stepped(states[-1], rng))
    objects = {}
    for pair in COMBINATIONS:
        run = tmp_path_factory.mktemp("run")
        write_chain(run, states, *pair, parts=2)
        objects[pair] = {
            path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*.*")
        }
    return states, objects


def bits_of(engine) -> dict[str, bytes]:
    return {name: engine.view(name).tobytes() for name in engine.tensors()}


@given(data=st.data())
def test_one_wrong_byte_is_refused_or_harmless(runs, data):
    states, objects = runs
    chosen = dict(objects[data.draw(st.sampled_from(COMBINATIONS))])
    key = data.draw(st.sampled_from(sorted(key for key in chosen if "v000002/" in key)))
    content = bytearray(chosen[key])
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    chosen[key] = bytes(content)
    store = MemoryStore()
    for name, whole in chosen.items():
        store.put(name, [whole])
    engine = engine_of(states[1])
    first = {name: raw(array).tobytes() for name, array in states[1].items()}
    second = {name: raw(array).tobytes() for name, array in states[2].items()}
    try:
        report = Receiver(store, engine, layout="slime").sync("000002")
    except SynclineError:
        assert bits_of(engine) == first
    else:
        assert report.identity == "000002"
        assert bits_of(engine) == second


@given(data=st.data())
def test_a_run_with_an_object_missing_is_refused_or_unchanged(runs, data):
    states, objects = runs
    chosen = dict(objects[data.draw(st.sampled_from(COMBINATIONS))])
    lost = data.draw(st.sampled_from(sorted(key for key in chosen if "v000002/" in key)))
    store = MemoryStore()
    for name, whole in chosen.items():
        if name != lost:
            store.put(name, [whole])
    engine = engine_of(states[1])
    with pytest.raises(SynclineError):
        Receiver(store, engine, layout="slime").sync("000002")
    assert bits_of(engine) == {name: raw(array).tobytes() for name, array in states[1].items()}


@given(seed=st.integers(0, 2**32 - 1))
def test_hostile_edits_are_refused_or_harmless(runs, seed):
    """Lengths that lie, JSON with one thing wrong, bytes moved: in the index, a header or a payload."""
    states, objects = runs
    rng = np.random.default_rng(seed)
    chosen = dict(objects[COMBINATIONS[rng.integers(len(COMBINATIONS))]])
    keys = sorted(key for key in chosen if "v000002/" in key)
    key = keys[rng.integers(len(keys))]
    content = chosen[key]
    if rng.random() < 0.4:
        chosen[key] = edited(content, rng)
    elif key.endswith(".json"):
        chosen[key] = edited_json(content, rng)
    else:
        length = int.from_bytes(content[:8], "little")
        header = edited_json(content[8 : 8 + length], rng)
        chosen[key] = len(header).to_bytes(8, "little") + header + content[8 + length :]
    store = MemoryStore()
    for name, whole in chosen.items():
        store.put(name, [whole])
    engine = engine_of(states[1])
    try:
        Receiver(store, engine, layout="slime").sync("000002")
    except SynclineError:
        assert bits_of(engine) == {name: raw(array).tobytes() for name, array in states[1].items()}
    else:
        assert bits_of(engine) == {name: raw(array).tobytes() for name, array in states[2].items()}
