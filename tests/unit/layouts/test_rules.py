"""How the words of a table are read, and what cannot be read or cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from syncline.errors import LayoutError
from syncline.layouts import Block, Family, MegatronMesh, Rule, check, families, megatron_layout
from syncline.layouts.rules import Cut, arrange, resolve
from syncline.layouts.values import to_canonical, to_local
from syncline.types import TensorMeta

DIMS = {"heads": 4, "head": 3, "hidden": 8, "inter": 6, "experts": 5, "groups": 2}
TINY = {
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
}


def test_sections_pick_a_part_of_an_axis() -> None:
    piece = resolve("w: heads.head+head#1 hidden", DIMS, "p.")
    assert (piece.name, piece.shape, piece.grid) == ("p.w", (24, 8), (4, 6, 8))
    assert (piece.start, piece.sides) == ((0, 3, 0), (12, 8))


def test_an_expert_is_one_index_of_a_stacked_tensor() -> None:
    piece = resolve("w: T e hidden inter.1+1#1", DIMS, "", expert=3)
    assert (piece.shape, piece.grid, piece.start) == ((5, 8, 12), (5, 8, 6, 2), (3, 0, 0, 1))
    assert piece.sides == (6, 8)


def test_a_query_group_is_cut_in_the_middle() -> None:
    """Four ranks for two groups of six q, one k and one v rows: half a group each, none repeated."""
    dims = {"q": 12, "kv": 2, "hidden": 8}
    pieces = [
        resolve(f"{name}: {rows} hidden", dims, "")
        for name, rows in zip("qkv", ("q", "kv", "kv"), strict=True)
    ]
    held = [arrange("qkv", pieces, Cut(rank, 4, 1, groups=2), "t") for rank in range(4)]
    assert [[str(block) for block in blocks] for _, blocks, _ in held[:3]] == [
        ["q[0:4, 0:8] = t@0 strides (8, 1)"],
        [
            "q[4:6, 0:8] = t@0 strides (8, 1)",
            "k[0:1, 0:8] = t@16 strides (8, 1)",
            "v[0:1, 0:8] = t@24 strides (8, 1)",
        ],
        ["q[6:10, 0:8] = t@0 strides (8, 1)"],
    ]


def test_groups_are_repeated_where_ranks_are_more() -> None:
    piece = resolve("w: kv", {"kv": 6}, "")
    held = [arrange("groups", [piece], Cut(rank, 4, 1, groups=2), "t") for rank in range(4)]
    assert [(blocks[0].start, blocks[0].shape, blocks[0].copies) for _, blocks, _ in held] == [
        *(((0,), (3,), 2), ((0,), (3,), 2), ((3,), (3,), 2), ((3,), (3,), 2))
    ]


def test_vocabulary_padding_lies_after_the_rows() -> None:
    piece = resolve("w: vocab hidden", {"vocab": 10, "hidden": 4}, "")
    held = [arrange("vocab", [piece], Cut(rank, 4, 1, padded_rows=16), "t") for rank in range(4)]
    assert [shape for shape, _, _ in held] == [(4, 4)] * 4
    assert [padding for _, _, padding in held] == [0, 0, 8, 16]
    assert [len(blocks) for _, blocks, _ in held] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("kind", "cut", "message"),
    [
        ("column", Cut(0, 5, 1), "cannot be cut into 5 equal parts"),
        ("row", Cut(0, 3, 1), "cannot be cut into 3 equal parts"),
        ("qkv", Cut(0, 1, 1, groups=5), "are not 5 groups"),
        ("diagonal", Cut(0, 1, 1), "no kind 'diagonal'"),
    ],
)
def test_what_cannot_be_cut_is_refused(kind: str, cut: Cut, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        arrange(kind, [resolve("w: heads*head hidden", DIMS, "")], cut, "t")


def test_pieces_must_stack() -> None:
    pieces = [resolve("a: inter hidden", DIMS, ""), resolve("b: inter heads", DIMS, "")]
    with pytest.raises(LayoutError, match="do not stack"):
        arrange("column", pieces, Cut(0, 1, 1), "t")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**TINY, "model_type": "unheard_of"}, "no family for model_type 'unheard_of'"),
        ({"model_type": "llama"}, r"the config gives no \['heads', 'hidden'"),
        ({**TINY, "model_type": "deepseek_v3"}, r"'heads\*nope', which the config does not give"),
        ({**TINY, "model_type": "llama", "dtype": "float8"}, "'float8' is not one of"),
        ({"model_type": "new_vl", "text_config": TINY}, "no prefix is known"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        megatron_layout(config, MegatronMesh(1))


def test_experts_must_divide() -> None:
    config = {**TINY, "model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 4}
    with pytest.raises(LayoutError, match="6 experts cannot be cut into 4"):
        megatron_layout(config, MegatronMesh(4, ep=4, etp=1))


def test_sequential_experts_and_old_names_are_spelled_as_seen() -> None:
    config = {**TINY, "model_type": "qwen3_moe", "num_experts": 2, "moe_intermediate_size": 4}
    seen = {
        "0/decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
        "0/decoder.layers.0.input_layernorm.weight",
    }
    layout = megatron_layout(config, MegatronMesh(1), seen=seen)
    check(layout)
    names = {tensor.name for tensor in layout.placements[0].tensors}
    assert seen <= names
    assert "0/decoder.layers.0.mlp.experts.linear_fc1.weight1" not in names


def test_stacked_experts_are_taken_as_seen() -> None:
    config = {**TINY, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 4}
    seen = {
        f"0/decoder.layers.{layer}.mlp.experts.linear_{which}.weight"
        for layer in range(2)
        for which in ("fc1", "fc2")
    }
    layout = megatron_layout(config, MegatronMesh(2, ep=2, etp=1), seen=seen)
    check(layout)
    shapes = {tensor.name: tensor.shape for tensor in layout.placements[1].tensors}
    assert shapes["0/decoder.layers.0.mlp.experts.linear_fc1.weight"] == (2, 8, 8)
    (block,) = (
        block for block in layout.placements[1].blocks if ".0.mlp.experts.3.up_proj" in block.name
    )
    assert block.offset == 8 * 8 + 4 * 8


def test_a_square_checkpoint_that_may_be_transposed_is_refused() -> None:
    """Qwen3-VL-MoE is saved inputs first or outputs first; only its shape says which."""
    config = {**TINY, "model_type": "qwen3_vl_moe_text", "num_experts": 2}
    plain = megatron_layout({**config, "moe_intermediate_size": 6}, MegatronMesh(1))
    turned = [
        replace(tensor.meta, shape=(tensor.meta.shape[0], *tensor.meta.shape[:0:-1]))
        if tensor.meta.name.endswith(("gate_up_proj", "down_proj"))
        else tensor.meta
        for tensor in plain.catalog.values()
    ]
    config["moe_intermediate_size"] = 6
    assert (
        megatron_layout(config, MegatronMesh(1), checkpoint=turned).placements != plain.placements
    )
    config["moe_intermediate_size"] = 4  # twice this is the hidden size
    square = [tensor.meta for tensor in megatron_layout(config, MegatronMesh(1)).catalog.values()]
    with pytest.raises(LayoutError, match=r"gate_up_proj: its shape \(2, 8, 8\) fits 2 ways"):
        megatron_layout(config, MegatronMesh(1), checkpoint=square)


def test_a_family_of_another_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Family((Rule("row", "mix.weight", ("mixer.weight: hidden inter",)),))

    class Point:
        name = "mine"

        def load(self) -> Family:
            return table

    monkeypatch.setattr(
        families, "entry_points", lambda group: [Point()] * (group == "syncline.families")
    )
    layout = megatron_layout({**TINY, "model_type": "mine"}, MegatronMesh(2, tp=2))
    check(layout)
    assert layout.catalog["model.layers.1.mixer.weight"].meta.shape == (8, 6)
    assert "0/decoder.layers.1.mix.weight" in {t.name for t in layout.placements[1].tensors}


NORM = Block("n", (0,), (3,), "t", 0, (1,), add=1)


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64", "BF16"])
def test_a_shifted_value_is_exact_both_ways(dtype: str) -> None:
    meta = TensorMeta("n", dtype, (3,))
    ones = {"F16": 0x3C00, "F32": 0x3F800000, "F64": 0x3FF0000000000000, "BF16": 0x3F80}[dtype]
    halves = {"F16": 0x3800, "F32": 0x3F000000, "F64": 0x3FE0000000000000, "BF16": 0x3F00}[dtype]
    canonical = np.array([ones, halves, ones], dtype=f"<u{meta.unit_bytes}")
    local = to_local(canonical, NORM, meta)
    assert int(local[0]) == 0
    np.testing.assert_array_equal(to_canonical(local, NORM, meta), canonical)


@pytest.mark.parametrize(
    ("dtype", "tiny"), [("F32", 0x2F800000), ("BF16", 0x3A01), ("F32", 0x7FC00000)]
)
def test_a_shift_that_rounds_is_refused(dtype: str, tiny: int) -> None:
    meta = TensorMeta("n", dtype, (1,))
    bits = np.array([tiny], dtype=f"<u{meta.unit_bytes}")
    with pytest.raises(LayoutError, match="is not exact"):
        to_canonical(bits, NORM, meta)
    with pytest.raises(LayoutError, match="cannot add"):
        to_canonical(bits.astype("<u1"), NORM, TensorMeta("n", "U8", (1,)))


NEXT = {
    **TINY,
    "model_type": "qwen3_next",
    "num_experts": 4,
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
DEEP = {
    **TINY,
    "model_type": "deepseek_v3",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 4,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 2,
    "v_head_dim": 2,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize("config", [NEXT, DEEP])
def test_the_checkpoint_says_whether_there_are_mtp_layers(config: dict[str, object]) -> None:
    with_mtp = {**config, "num_nextn_predict_layers": 1}
    layout = megatron_layout(with_mtp, MegatronMesh(4, tp=2, pp=2, etp=1))
    check(layout)
    metas = [tensor.meta for tensor in layout.catalog.values()]
    plain = megatron_layout({**config, "num_nextn_predict_layers": 0}, MegatronMesh(1))
    without = [tensor.meta for tensor in plain.catalog.values()]
    assert len(metas) > len(without)
    for given in (config, with_mtp):
        assert set(megatron_layout(given, MegatronMesh(1), checkpoint=metas).catalog) == set(
            layout.catalog
        )
        short = megatron_layout(given, MegatronMesh(1), checkpoint=without)
        assert set(short.catalog) == set(plain.catalog)
        left_out = megatron_layout(given, MegatronMesh(1), checkpoint=metas, mtp=0)
        assert set(left_out.catalog) == set(plain.catalog)


def test_stored_copies_may_be_missing_from_a_checkpoint() -> None:
    config = {**DEEP, "num_nextn_predict_layers": 1}
    metas = [tensor.meta for tensor in megatron_layout(config, MegatronMesh(1)).catalog.values()]
    kept = [meta for meta in metas if ".2.embed_tokens" not in meta.name]
    assert len(kept) == len(metas) - 1
    check(megatron_layout(config, MegatronMesh(2, pp=2), checkpoint=kept))
    with pytest.raises(
        LayoutError, match=r"model\.layers\.2\.enorm\.weight: not in the checkpoint"
    ):
        megatron_layout(
            config, MegatronMesh(1), checkpoint=[m for m in kept if "enorm" not in m.name]
        )
    extra = TensorMeta("left_over", "BF16", (1,))
    with pytest.raises(LayoutError, match="left_over: only in the checkpoint"):
        megatron_layout(config, MegatronMesh(1), checkpoint=[*kept, extra])
