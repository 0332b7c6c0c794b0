"""The algebra of blocks on random layouts: nothing is lost, whatever the layouts are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from random_layouts import (
    empty_shards,
    random_catalog,
    random_layout,
    random_split,
    random_values,
)
from syncline import kernels
from syncline.errors import CoverageError
from syncline.layouts import Layout, PositionMap, check, fingerprint, gather, once, scatter
from syncline.plan import Mover, execute, load_of, make_plan
from syncline.types import ZERO

seeds = st.integers(0, 2**32 - 1)


def _random(seed: int) -> tuple[np.random.Generator, Layout]:
    rng = np.random.default_rng(seed)
    return rng, random_layout(random_catalog(rng), int(rng.integers(1, 5)), rng)


@given(seeds)
def test_what_is_scattered_is_gathered(seed: int) -> None:
    rng, layout = _random(seed)
    check(layout)
    values, shards = random_values(layout.catalog, rng), empty_shards(layout)
    scatter(layout, values.values(), shards)
    found = {meta.name: bits for meta, bits in gather(layout, shards)}
    assert found.keys() == values.keys()
    for name, (_, bits) in values.items():
        np.testing.assert_array_equal(found[name], bits)


@given(seeds)
def test_a_plan_followed_is_the_canonical_tensor_cut(seed: int) -> None:
    rng, source = _random(seed)
    catalog = {name: random_split(tensor, rng) for name, tensor in source.catalog.items()}
    target, engines = random_layout(catalog, int(rng.integers(1, 5)), rng), int(rng.integers(1, 3))
    values, shards = random_values(catalog, rng), empty_shards(source)
    scatter(source, values.values(), shards)
    expected = empty_shards(target)
    scatter(target, values.values(), expected)
    limit_bytes = int(rng.integers(64, 600))
    plan = make_plan(source, target, engines=engines, limit_bytes=limit_bytes)
    again = make_plan(source, target, engines=engines, limit_bytes=limit_bytes)
    again.agree(plan.digest)
    fleet = [empty_shards(target) for _ in range(engines)]
    execute(
        plan,
        {p.rank: Mover(source, p, shards[p.rank]) for p in source.placements},
        {
            (engine, p.rank): Mover(target, p, memory[p.rank])
            for engine, memory in enumerate(fleet)
            for p in target.placements
        },
    )
    for memory in fleet:
        for rank, shard in expected.items():
            for name, bits in shard.items():
                np.testing.assert_array_equal(memory[rank][name], bits)
    load = load_of(plan)
    wanted = sum(
        block.count * target.catalog[block.name].meta.unit_bytes
        for placement in target.placements
        for block in placement.blocks
    )
    assert load.moved_bytes == engines * wanted
    assert load.staged_bytes <= limit_bytes


@given(seeds)
def test_positions_go_where_dense_values_go(seed: int) -> None:
    rng, layout = _random(seed)
    old, new = random_values(layout.catalog, rng), {}
    for name, (meta, bits) in old.items():
        which = rng.random(bits.size) < 0.3
        new[name] = (meta, np.where(which, bits ^ bits.dtype.type(1), bits))
    before, after = empty_shards(layout), empty_shards(layout)
    scatter(layout, old.values(), before)
    scatter(layout, new.values(), after)
    back = {name: bits.copy() for name, (_, bits) in old.items()}
    for placement in layout.placements:
        position_map = PositionMap(layout.catalog, placement)
        shard = {name: bits.copy() for name, bits in before[placement.rank].items()}
        for name, (_, bits) in new.items():
            positions = np.flatnonzero(bits != old[name][1])
            moved = position_map.to_local(name, positions, bits[positions])
            for local, (places, values) in moved.items():
                assert (np.diff(places) > 0).all()
                shard[local][places] = values
        for local, bits in after[placement.rank].items():
            np.testing.assert_array_equal(shard[local], bits)
            positions = np.flatnonzero(bits != before[placement.rank][local])
            moved = position_map.to_canonical(local, positions, bits[positions])
            for name, (places, values) in moved.items():
                assert (np.diff(places) > 0).all()
                back[name][places] = values
    for name, (_, bits) in new.items():
        np.testing.assert_array_equal(back[name], bits)


@given(seeds)
def test_fingerprints_of_shards_add_up_to_the_whole(seed: int) -> None:
    rng, layout = _random(seed)
    values, shards = random_values(layout.catalog, rng), empty_shards(layout)
    scatter(layout, values.values(), shards)
    single = once(layout)
    total = dict.fromkeys(values, ZERO)
    for placement in single.placements:
        for name, value in fingerprint(layout.catalog, placement, shards[placement.rank]).items():
            total[name] += value
    for name, (_, bits) in values.items():
        assert total[name] == kernels.fingerprint(bits, 0, kernels.seeds(name))


@given(seeds)
def test_a_layout_that_is_not_legal_is_refused(seed: int) -> None:
    rng, layout = _random(seed)
    holders = [p for p in layout.placements if p.blocks]
    assume(holders)
    placement = holders[int(rng.integers(len(holders)))]
    block = placement.blocks[int(rng.integers(len(placement.blocks)))]
    others = tuple(other for other in placement.blocks if other is not block)
    axes = [axis for axis, side in enumerate(block.shape) if side > 1]
    broken = [
        others,
        (*placement.blocks, block),
        (*others, replace(block, copies=block.copies + 1)),
        (*others, replace(block, name="nobody")),
        (*others, replace(block, local="nowhere")),
        (*others, replace(block, offset=block.offset + 10_000)),
    ]
    if axes:
        shape = tuple(n - (k == axes[0]) for k, n in enumerate(block.shape))
        start = tuple(a + (k == axes[0]) for k, a in enumerate(block.start))
        broken.append((*others, replace(block, shape=shape)))
        broken.append((*others, replace(block, start=start)))
    for blocks in broken:
        changed = replace(placement, blocks=blocks)
        placements = tuple(changed if p is placement else p for p in layout.placements)
        with pytest.raises(CoverageError):
            check(Layout(layout.catalog, placements))
