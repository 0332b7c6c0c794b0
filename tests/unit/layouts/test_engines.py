"""Engine placements: the facts of vLLM's and SGLang's sources that plans rest on."""

from __future__ import annotations

import numpy as np
import pytest

from random_layouts import empty_shards, random_values
from syncline.errors import ConfigError, LayoutError
from syncline.layouts import (
    EngineMesh,
    Layout,
    MegatronMesh,
    PositionMap,
    check,
    engine_layout,
    megatron_layout,
    scatter,
)
from syncline.plan import Mover, execute, make_plan
from syncline.types import Bits, TensorMeta

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 100,
    "num_experts": 10,
    "moe_intermediate_size": 12,
}


def _boxes(layout: Layout, rank: int, local: str) -> list[str]:
    return [str(b).partition(" = ")[0] for b in layout.placements[rank].blocks if b.local == local]


def test_experts_that_do_not_divide_go_to_the_first_ranks() -> None:
    assert [len(held) for held in EngineMesh(4, ep=4).experts(10)] == [3, 3, 2, 2]
    assert EngineMesh(4, ep=4, placement="round_robin").experts(10)[1] == (1, 5, 9)


def test_redundant_slots_begin_again() -> None:
    slots = EngineMesh(4, ep=4, redundant=4).experts(8)
    assert [expert for held in slots for expert in held] == [*range(8), 0, 1, 2, 3]


def test_a_map_of_a_rebalanced_engine_is_taken() -> None:
    mesh = EngineMesh(2, ep=2, slots=(0, 1, 1, 2))
    assert mesh.experts(3) == ((0, 1), (1, 2))
    with pytest.raises(LayoutError, match="each of 4 experts"):
        mesh.experts(4)


def test_kv_heads_are_repeated_where_ranks_are_more() -> None:
    layout = engine_layout(CONFIG, EngineMesh(4))
    check(layout)
    local = "model.layers.0.self_attn.qkv_proj.weight"
    prefix = "model.layers.0.self_attn"
    assert _boxes(layout, 1, local) == [
        f"{prefix}.q_proj.weight[8:16, 0:16]",
        f"{prefix}.k_proj.weight[0:4, 0:16]",
        f"{prefix}.v_proj.weight[0:4, 0:16]",
    ]
    assert _boxes(layout, 2, local)[1] == f"{prefix}.k_proj.weight[4:8, 0:16]"


def test_the_vocabulary_is_padded_to_64_and_then_cut() -> None:
    layout = engine_layout(CONFIG, EngineMesh(2))
    tensors = [{t.name: t for t in placement.tensors} for placement in layout.placements]
    assert [held["lm_head.weight"].shape for held in tensors] == [(64, 16), (64, 16)]
    assert [held["lm_head.weight"].padding for held in tensors] == [0, 28 * 16]


def test_experts_are_stacked_whole_or_cut() -> None:
    cut = engine_layout(CONFIG, EngineMesh(2))
    whole = engine_layout(CONFIG, EngineMesh(2, ep=2))
    shapes = [
        {
            t.name.rpartition(".")[2]: t.shape
            for t in layout.placements[1].tensors
            if "w13" in t.name or "w2" in t.name
        }
        for layout in (cut, whole)
    ]
    assert shapes == [
        {"w13_weight": (10, 12, 16), "w2_weight": (10, 16, 6)},
        {"w13_weight": (5, 24, 16), "w2_weight": (5, 16, 12)},
    ]


@pytest.mark.parametrize(
    "mesh", [EngineMesh(), EngineMesh(8, ep=8), EngineMesh(4, ep=4, redundant=3)]
)
def test_engine_layouts_are_legal(mesh: EngineMesh) -> None:
    check(engine_layout(CONFIG, mesh))


def test_sizes_that_make_no_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="ep is 1 or tp"):
        EngineMesh(4, ep=2)
    with pytest.raises(LayoutError, match="cannot be cut into 3"):
        engine_layout(CONFIG, EngineMesh(3))


SLOTS = {
    "redundant": EngineMesh(4, ep=4, redundant=6),
    "rebalanced": EngineMesh(2, ep=2, slots=(9, 3, 3, 0, 1, 2, 4, 7, 5, 6, 8, 9, 3, 1)),
    "one on every rank": EngineMesh(2, ep=2, slots=(5, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 5)),
}


@pytest.mark.parametrize("name", sorted(SLOTS))
def test_every_slot_gets_its_expert_whole_and_as_changes(name: str) -> None:
    """A plan followed, and positions mapped, against each slot cut out of the checkpoint by hand."""
    mesh, rng = SLOTS[name], np.random.default_rng(5)
    source = megatron_layout(CONFIG, MegatronMesh(4, tp=2, ep=2, etp=1))
    target = engine_layout(CONFIG, mesh)
    check(target)
    whole = random_values(source.catalog, rng)
    shards, engine = empty_shards(source), empty_shards(target)
    scatter(source, whole.values(), shards)
    plan = make_plan(source, target, engines=1, limit_bytes=1 << 20)
    movers = {p.rank: Mover(source, p, shards[p.rank]) for p in source.placements}
    execute(
        plan, movers, {(0, p.rank): Mover(target, p, engine[p.rank]) for p in target.placements}
    )
    _assert_slots(mesh, whole, engine)

    for name_, (meta, bits) in whole.items():
        positions = np.flatnonzero(rng.random(bits.size) < 0.2)
        bits[positions] ^= 5
        for placement in target.placements:
            moved = PositionMap(target.catalog, placement).to_local(
                name_, positions, bits[positions]
            )
            for local, (places, values) in moved.items():
                engine[placement.rank][local][places] = values
        assert meta.name == name_
    _assert_slots(mesh, whole, engine)


def _assert_slots(
    mesh: EngineMesh,
    whole: dict[str, tuple[TensorMeta, Bits]],
    engine: dict[int, dict[str, Bits]],
) -> None:
    path = "model.layers.0.mlp.experts"
    seen = 0
    for rank, held in enumerate(mesh.experts(10)):
        for local, parts, shape in (
            ("w13_weight", ("gate_proj", "up_proj"), (24, 16)),
            ("w2_weight", ("down_proj",), (16, 12)),
        ):
            found = engine[rank][f"{path}.routed_experts.{local}"].reshape(-1, *shape)
            assert len(found) == len(held)
            for slot, expert in enumerate(held):
                pieces = [whole[f"{path}.{expert}.{part}.weight"][1] for part in parts]
                np.testing.assert_array_equal(found[slot].ravel(), np.concatenate(pieces))
                seen += 1
    assert seen > 20
