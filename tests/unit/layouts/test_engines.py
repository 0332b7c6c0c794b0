"""Engine placements: the facts of vLLM's and SGLang's sources that plans rest on."""

from __future__ import annotations

import pytest

from syncline.errors import ConfigError, LayoutError
from syncline.layouts import EngineMesh, Layout, check, engine_layout

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
