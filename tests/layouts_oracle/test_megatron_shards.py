"""Real shards, made by megatron-core and an independent bridge, against our tables: bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shard_files import Case, case_paths, read_case
from syncline import kernels
from syncline.errors import LayoutError, VerifyError
from syncline.layouts import PositionMap, check, fingerprint, gather, match, once, scatter
from syncline.types import ZERO


@pytest.fixture(
    scope="module", params=case_paths(), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def case(request: pytest.FixtureRequest) -> Case:
    path: Path = request.param
    return read_case(path)


def test_tables_name_exactly_what_ranks_and_checkpoint_hold(case: Case) -> None:
    layout = case.layout()
    check(layout)
    for rank, placement in enumerate(layout.placements):
        match(placement, case.found(rank))
    assert set(layout.catalog) == set(case.checkpoint)


def test_shards_convert_to_the_checkpoint(case: Case) -> None:
    found = {meta.name: (meta, bits) for meta, bits in gather(case.layout(), case.bits())}
    assert list(found) == list(case.layout().catalog)
    for name, (meta, bits) in case.checkpoint.items():
        assert found[name][0] == meta
        np.testing.assert_array_equal(found[name][1], bits, err_msg=name)


def test_checkpoint_converts_to_the_shards(case: Case) -> None:
    layout = case.layout()
    # Padding keeps what was there; everything else must come out of the checkpoint.
    shards = case.bits()
    named = {
        (placement.rank, tensor.name): tensor.padding
        for placement in layout.placements
        for tensor in placement.tensors
    }
    for (rank, name), padding in named.items():
        bits = shards[rank][name]
        bits[: bits.size - padding] = 0
    scatter(layout, case.checkpoint.values(), shards)
    for rank, shard in enumerate(case.shards):
        for name, (_, bits) in shard.items():
            np.testing.assert_array_equal(shards[rank][name], bits, err_msg=f"rank {rank}: {name}")


def test_local_changes_map_to_the_checkpoint(case: Case) -> None:
    """Every rank maps its own changes; together they turn a stale checkpoint into the new one."""
    layout, rng = case.layout(), np.random.default_rng(7)
    stale = {name: bits.copy() for name, (_, bits) in case.checkpoint.items()}
    changed = {name: rng.random(bits.size) < 0.05 for name, bits in stale.items()}
    _follow_stored_copies(case, changed)
    for name, bits in stale.items():
        bits[changed[name]] ^= bits.dtype.type(1)
    old = case.bits()
    scatter(layout, [(case.checkpoint[name][0], stale[name]) for name in layout.catalog], old)
    for placement in layout.placements:
        position_map = PositionMap(layout.catalog, placement)
        for local, (_, new) in case.shards[placement.rank].items():
            positions = np.flatnonzero(old[placement.rank][local] != new)
            for name, (places, bits) in position_map.to_canonical(
                local, positions, new[positions]
            ).items():
                assert (np.diff(places) > 0).all()
                assert changed[name][places].all()
                stale[name][places] = bits
    for name, (_, bits) in case.checkpoint.items():
        np.testing.assert_array_equal(stale[name], bits, err_msg=name)


def test_canonical_changes_map_to_the_shards(case: Case) -> None:
    layout, rng = case.layout(), np.random.default_rng(8)
    new = {name: bits.copy() for name, (_, bits) in case.checkpoint.items()}
    changed = {name: rng.random(bits.size) < 0.05 for name, bits in new.items()}
    _follow_stored_copies(case, changed)
    for name, bits in new.items():
        bits[changed[name]] ^= bits.dtype.type(1)
    expected, shards = case.bits(), case.bits()
    scatter(layout, [(case.checkpoint[name][0], new[name]) for name in layout.catalog], expected)
    for placement in layout.placements:
        position_map = PositionMap(layout.catalog, placement)
        for name, which in changed.items():
            positions = np.flatnonzero(which)
            for local, (places, bits) in position_map.to_local(
                name, positions, new[name][positions]
            ).items():
                assert (np.diff(places) > 0).all()
                shards[placement.rank][local][places] = bits
    for rank, shard in expected.items():
        for name, bits in shard.items():
            np.testing.assert_array_equal(shards[rank][name], bits, err_msg=f"rank {rank}: {name}")


def test_each_change_is_published_by_one_rank(case: Case) -> None:
    """Ranks that answer for their boxes publish together what one process with everything would."""
    layout, rng = case.layout(), np.random.default_rng(9)
    old = {name: bits.copy() for name, (_, bits) in case.checkpoint.items()}
    changed = {name: rng.random(bits.size) < 0.02 for name, bits in old.items()}
    _follow_stored_copies(case, changed)
    for name, bits in old.items():
        bits[changed[name]] ^= bits.dtype.type(1)
    before = case.bits()
    scatter(layout, [(case.checkpoint[name][0], old[name]) for name in layout.catalog], before)
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in old}
    proofs = dict.fromkeys(old, ZERO)
    for placement in once(layout).placements:
        position_map = PositionMap(layout.catalog, placement)
        shard = {name: bits for name, (_, bits) in case.shards[placement.rank].items()}
        for local, new in shard.items():
            positions = np.flatnonzero(before[placement.rank][local] != new)
            for name, part in position_map.to_canonical(local, positions, new[positions]).items():
                parts[name].append(part)
        for name, value in fingerprint(layout.catalog, placement, shard).items():
            proofs[name] += value
    for name, (_, bits) in case.checkpoint.items():
        places = np.concatenate([part[0] for part in parts[name]] or [np.zeros(0, np.int64)])
        np.testing.assert_array_equal(np.sort(places), np.flatnonzero(changed[name]))
        for where, values in parts[name]:
            np.testing.assert_array_equal(values, bits[where])
        assert proofs[name] == kernels.fingerprint(bits, 0, kernels.seeds(name))


def _follow_stored_copies(case: Case, changed: dict[str, np.ndarray]) -> None:
    """Change the checkpoint's own copies of embedding and output where these change."""
    for name in changed:
        if name.endswith(".embed_tokens.weight") and ".layers." in name:
            changed[name] = changed["model.embed_tokens.weight"]
        if name.endswith("shared_head.head.weight"):
            changed[name] = changed["lm_head.weight"]


def test_a_drifted_replica_is_named(case: Case) -> None:
    shards = case.bits()
    local = f"{case.mesh.vpp - 1}/decoder.final_layernorm.weight"
    first, second = [rank for rank, shard in shards.items() if local in shard][:2]
    shards[second][local][3] ^= 1
    with pytest.raises(VerifyError, match=rf"ranks {first} and {second} .* indices \[3\]"):
        list(gather(case.layout(), shards))


def test_a_missed_tensor_is_named(case: Case) -> None:
    layout, found = case.layout(), case.found(0)
    missed = next(iter(found))
    shape = found.pop(missed)
    with pytest.raises(LayoutError, match="the rank does not have it"):
        match(layout.placements[0], found)
    with pytest.raises(LayoutError, match="does not know it"):
        match(layout.placements[0], {**found, missed: shape, "0/decoder.layers.0.new": shape})
