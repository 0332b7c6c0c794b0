"""A receiver on a directory that somebody else's publisher writes, as slime and its kin do."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import slime_oracle as oracle
from slime_oracle import (
    assert_holds,
    engine_of,
    model,
    raw,
    reader,
    stepped,
    write_chain,
    write_delta,
    write_full,
)
from syncline import CheckpointDir, MemoryEngine, Receiver
from syncline.errors import BaseVersionError, FormatError, LayoutError, VerifyError


@pytest.fixture
def states(rng):
    """Weights at the base and after each of three steps."""
    states = [model(rng)]
    for _ in range(3):
        states.append(stepped(states[-1], rng))
    return states


@pytest.mark.parametrize(("encoding", "checksum"), oracle.COMBINATIONS)
@pytest.mark.parametrize("first", [0, 1])
def test_all_six_combinations_lead_from_the_base_to_the_newest(
    tmp_path, states, encoding, checksum, first
):
    write_chain(tmp_path / "run", states, encoding, checksum, parts=2, first=first)
    engine = engine_of(states[0])
    report = Receiver(reader(tmp_path / "run"), engine, layout="slime", verify="full").sync()
    assert_holds(engine, states[3])
    assert (report.layout, report.identity, len(report.applied)) == ("slime", "000003", 3)
    assert any("'000000' is not in the directory" in sentence for sentence in report.missing)
    assert ("adler32" in " ".join(report.missing)) == (checksum == "adler32")


def test_it_follows_step_by_step_and_does_nothing_when_there_is_nothing_new(tmp_path, states):
    run, engine = tmp_path / "run", engine_of(states[0])
    receiver = Receiver(reader(run), engine)
    for number in (1, 2, 3):
        write_chain(run, states[: number + 1]) if number == 1 else write_delta(
            run, f"{number:06d}", f"{number - 1:06d}", states[number - 1], states[number]
        )
        report = receiver.sync()
        assert (report.identity, len(report.applied)) == (f"{number:06d}", 1)
        assert report.changed > 0
        assert_holds(engine, states[number])
        assert receiver.sync().applied == ()


@pytest.mark.parametrize("checksum", [None, "adler32", "blake3"])
def test_a_full_version_fills_an_empty_engine_and_resets_a_chain(tmp_path, states, checksum, rng):
    run, fresh = tmp_path / "run", stepped(states[3], rng, 0.9)
    write_chain(run, states)
    write_full(run, "weight_v000004", fresh, checksum)
    after = stepped(fresh, rng)
    write_delta(run, "000005", "000004", fresh, after)
    empty, following = MemoryEngine(), engine_of(states[0])
    report = Receiver(reader(run), empty).sync("000005")
    assert_holds(empty, after)
    assert len(report.applied) == 2
    assert any("no digests" in sentence for sentence in report.missing) == (checksum is None)
    assert empty.files == {"config.json": b'{"model_type": "oracle"}'}
    receiver = Receiver(reader(run), following)
    receiver.sync("000003")
    assert_holds(following, states[3])
    assert len(receiver.sync("000005").applied) == 2
    assert_holds(following, after)


def test_names_of_versions_are_opaque(tmp_path, states):
    run = tmp_path / "run"
    write_delta(run, "zebra", "moon", states[0], states[1], directory="d-9")
    write_delta(run, "aardvark 2", "zebra", states[1], states[2], directory="d-1")
    engine = engine_of(states[0])
    assert Receiver(reader(run), engine).sync().identity == "aardvark 2"
    assert_holds(engine, states[2])


def test_a_base_may_be_named_by_its_directory(tmp_path, states):
    run = tmp_path / "run"
    write_full(run, "weight_v000001", states[0], "adler32")
    write_delta(
        run,
        "weight_v000002",
        "weight_v000001",
        states[0],
        states[1],
        "xor",
        "adler32",
        directory="weight_v000002",
    )
    engine = MemoryEngine()
    assert Receiver(reader(run), engine).sync().identity == "weight_v000002"
    assert_holds(engine, states[1])


def test_an_older_version_can_be_named_by_number_but_a_delta_does_not_lead_back(tmp_path, states):
    write_chain(tmp_path / "run", states)
    engine = engine_of(states[0])
    receiver = Receiver(reader(tmp_path / "run"), engine)
    assert receiver.sync(2).identity == "000002"
    assert_holds(engine, states[2])
    with pytest.raises(BaseVersionError, match="holds version '000002', on which '000001' is not"):
        receiver.sync("000001")
    with pytest.raises(BaseVersionError, match="'000009' is not there, or not whole yet"):
        receiver.sync("000009")
    assert_holds(engine, states[2])


def test_a_version_without_any_change_moves_the_engine_on(tmp_path, states):
    run, engine = tmp_path / "run", engine_of(states[0])
    write_delta(run, "000001", "000000", states[0], states[0])
    report = Receiver(reader(run), engine).sync()
    assert (report.identity, report.changed) == ("000001", 0)
    assert_holds(engine, states[0])


def test_a_checkpoint_on_disk_follows_through_its_journal_and_survives_a_restart(tmp_path, states):
    run, base = tmp_path / "run", tmp_path / "ckpt"
    base.mkdir()
    save_file(states[0], base / "model.safetensors", {"format": "pt"})
    write_chain(run, states[:2])
    Receiver(reader(run), CheckpointDir(base, adopt=True)).sync()
    write_delta(run, "000002", "000001", states[1], states[2], "overwrite", "blake3")
    report = Receiver(reader(run), CheckpointDir(base)).sync()
    assert (report.identity, len(report.applied)) == ("000002", 1)
    found = load_file(base / "model.safetensors")
    assert all(raw(found[name]).tobytes() == raw(states[2][name]).tobytes() for name in found)


def test_a_new_checkpoint_is_made_from_a_full_version(tmp_path, states):
    write_full(tmp_path / "run", "weight_v000007", states[1])
    target = tmp_path / "new"
    Receiver(reader(tmp_path / "run"), CheckpointDir(target)).sync()
    found = load_file(target / "model.safetensors")
    assert all(raw(found[name]).tobytes() == raw(states[1][name]).tobytes() for name in states[1])
    assert (target / "config.json").exists()


def test_two_ends_of_the_chain_are_listed_and_not_guessed_between(tmp_path, states):
    run = tmp_path / "run"
    write_chain(run, states[:2])
    write_delta(run, "000002", "000001", states[1], states[2])
    write_delta(run, "000012", "000001", states[1], states[3])
    with pytest.raises(FormatError, match="'000002', '000012' are bases of no other"):
        Receiver(reader(run), engine_of(states[0])).sync()


def test_an_engine_of_another_model_is_told_before_anything_is_written(tmp_path, states):
    write_full(tmp_path / "run", "weight_v000001", states[1])
    other = engine_of({"other": np.zeros(3, np.float32)})
    with pytest.raises(LayoutError, match="missing embed.weight"):
        Receiver(reader(tmp_path / "run"), other).sync()
    assert other.held() is None


def test_repair_starts_from_a_full_version_and_says_so_where_there_is_none(tmp_path, states):
    run, engine = tmp_path / "run", engine_of(states[0])
    write_full(run, "weight_v000001", states[1])
    receiver = Receiver(reader(run), engine)
    receiver.sync()
    engine.bits("norm")[0] ^= 1
    receiver.sync(repair=True)
    assert_holds(engine, states[1])
    shutil.rmtree(run / "weight_v000001")
    write_delta(run, "000002", "000001", states[1], states[2])
    with pytest.raises(BaseVersionError, match="cannot be rebuilt: its chain begins with '000002'"):
        receiver.sync(repair=True)


def test_an_engine_of_one_layout_does_not_follow_another(tmp_path, states):
    import syncline

    store = syncline.open_store(tmp_path / "ours")
    syncline.Publisher(store, encoding="xor").publish(states[0])
    engine = MemoryEngine()
    Receiver(store, engine).sync()
    write_delta(tmp_path / "run", "000002", "000001", states[0], states[1])
    with pytest.raises(BaseVersionError, match="not in this directory"):
        Receiver(reader(tmp_path / "run"), engine).sync()
    assert_holds(engine, states[0])


def test_bits_of_the_changed_tensors_are_proved_and_with_full_those_of_all(tmp_path, states):
    run, engine = tmp_path / "run", engine_of(states[0])
    write_chain(run, states[:2])
    receiver = Receiver(reader(run), engine, verify="full")
    receiver.sync()
    engine.bits("norm")[0] ^= 1  # no delta ever carries it
    write_delta(run, "000002", "000001", states[1], states[2])
    with pytest.raises(VerifyError, match="norm"):
        receiver.sync()


@pytest.mark.parametrize("names", [("embed", "head"), ("embed",), ("head",)])
def test_tied_weights_may_come_under_one_name_or_under_both(tmp_path, rng, names):
    torch = pytest.importorskip("torch")
    from syncline import TorchModule

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Parameter(torch.zeros(50, 4), requires_grad=False)
            self.head = self.embed
            self.norm = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    module = Tied()
    states = [{"embed": np.zeros((50, 4), np.float32), "norm": np.ones(4, np.float32)}]
    for _ in range(2):
        moved = states[-1]["embed"] + (rng.random((50, 4)) < 0.2).astype(np.float32)
        states.append({**states[-1], "embed": moved})
    published = [dict.fromkeys(names, state["embed"]) for state in states]
    write_chain(tmp_path / "run", published)
    receiver = Receiver(reader(tmp_path / "run"), TorchModule(module), verify="full")
    for number in (1, 2):
        receiver.sync(number)
        assert (module.head.numpy() == states[number]["embed"]).all()
        assert (module.norm.numpy() == 1).all()


def test_tied_weights_with_different_bits_are_refused(tmp_path, rng):
    torch = pytest.importorskip("torch")
    from syncline import TorchModule

    module = torch.nn.Module()
    module.embed = torch.nn.Parameter(torch.zeros(50, 4), requires_grad=False)
    module.head = module.embed
    old = dict.fromkeys(("embed", "head"), np.zeros((50, 4), np.float32))
    new = {"embed": old["embed"] + np.float32(1), "head": old["head"] - np.float32(1)}
    write_delta(tmp_path / "run", "000001", "000000", old, new)
    with pytest.raises(LayoutError, match="'embed' and 'head' are tied in the engine"):
        Receiver(reader(tmp_path / "run"), TorchModule(module)).sync()
    assert (module.embed.numpy() == 0).all()
