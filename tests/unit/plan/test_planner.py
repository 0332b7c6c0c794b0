"""Plans: load spread over copies, buckets under a limit, bundles whole, digests that tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from syncline.errors import ConfigError, CoverageError, PlanDisagreementError, PlanError
from syncline.layouts import EngineMesh, Layout, MegatronMesh, engine_layout, megatron_layout, plain
from syncline.plan import Mover, Piece, incoming, intersect, load_of, make_plan, outgoing
from syncline.types import TensorMeta

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "vocab_size": 128,
    "num_nextn_predict_layers": 1,
}
LIMIT = 1 << 14


@pytest.fixture(scope="module")
def source() -> Layout:
    return megatron_layout(CONFIG, MegatronMesh(16, tp=2, pp=2, ep=2, etp=1))


@pytest.fixture(scope="module")
def target() -> Layout:
    return engine_layout(CONFIG, EngineMesh(4, ep=4))


def _unused(source: Layout, target: Layout) -> set[str]:
    return source.catalog.keys() - target.catalog.keys()


def test_what_nobody_wants_must_be_named(source: Layout, target: Layout) -> None:
    with pytest.raises(CoverageError, match="no target rank wants it; name it in `unused`"):
        intersect(source, target)
    pieces = intersect(source, target, _unused(source, target))
    assert {piece.name for piece in pieces} == set(target.catalog)


def test_what_nobody_has_is_an_error(source: Layout, target: Layout) -> None:
    with pytest.raises(CoverageError, match="the target wants it, no source rank has it"):
        intersect(target, source)


def test_another_dtype_is_an_error(source: Layout, target: Layout) -> None:
    norm = target.catalog["model.norm.weight"].meta
    wide = {**target.catalog, norm.name: plain(replace(norm, dtype="F32"))}
    with pytest.raises(
        CoverageError, match=r"BF16 \(32,\) at the source, F32 \(32,\) at the target"
    ):
        intersect(source, replace(target, catalog=wide), _unused(source, target))


def test_holders_share_the_sending(source: Layout, target: Layout) -> None:
    plan = make_plan(source, target, engines=8, unused=_unused(source, target))
    load = load_of(plan)
    sent = load.sent_bytes.reshape(2, 8)
    assert (sent.max(axis=1) <= 1.02 * sent.mean(axis=1)).all()
    received = load.received_bytes.reshape(8, 4)
    assert (received == received[0]).all()
    wanted = sum(
        block.count * target.catalog[block.name].meta.unit_bytes
        for block in target.placements[2].blocks
    )
    assert received[0, 2] == wanted
    assert load.moved_bytes == received.sum()
    one = load_of(make_plan(source, target, unused=_unused(source, target)))
    assert one.repeated_bytes < load.repeated_bytes < load.moved_bytes


def test_buckets_keep_their_limit_and_their_bundles(source: Layout, target: Layout) -> None:
    plan = make_plan(source, target, limit_bytes=LIMIT, unused=_unused(source, target))
    assert load_of(plan).staged_bytes <= LIMIT
    assert len(plan.buckets) > 3
    where: dict[str, set[int]] = {}
    for number, bucket in enumerate(plan.buckets):
        for transfer in bucket:
            name = transfer.piece.name
            key = name.rpartition(".experts.")[0] + name.partition(".experts.")[2].partition(".")[0]
            if ".experts." in name:
                where.setdefault(key, set()).add(number)
            if "q_a_proj" in name or "kv_a_proj" in name:
                where.setdefault(name.partition("self_attn")[0], set()).add(number)
    assert len(where) == 3 * 8 + 4
    assert all(len(numbers) == 1 for numbers in where.values())


def test_a_bundle_larger_than_a_bucket_is_refused(source: Layout, target: Layout) -> None:
    with pytest.raises(PlanError, match="its bundle of 3 pieces needs 3072 bytes"):
        make_plan(source, target, limit_bytes=2048, unused=_unused(source, target))


def test_a_tensor_larger_than_a_bucket_is_split() -> None:
    config = {
        **CONFIG,
        "model_type": "llama",
        "num_nextn_predict_layers": 0,
        "vocab_size": 1024,
    }
    config.pop("n_routed_experts")
    here, there = megatron_layout(config, MegatronMesh(1)), engine_layout(config, EngineMesh())
    plan = make_plan(here, there, limit_bytes=3000)
    pieces = [transfer.piece for bucket in plan.buckets for transfer in bucket]
    embedding = [piece for piece in pieces if piece.name == "model.embed_tokens.weight"]
    assert len(embedding) > 20
    assert sum(piece.nbytes for piece in embedding) == 1024 * 32 * 2
    assert max(piece.nbytes for piece in pieces) <= 3000


def test_digests_tell_plans_apart(source: Layout, target: Layout) -> None:
    unused = _unused(source, target)
    plan = make_plan(source, target, unused=unused)
    make_plan(source, target, unused=unused).agree(plan.digest)
    other = make_plan(source, target, engines=2, unused=unused)
    with pytest.raises(PlanDisagreementError, match=plan.digest):
        plan.agree(other.digest)


def test_both_sides_see_the_same_messages(source: Layout, target: Layout) -> None:
    plan = make_plan(source, target, engines=2, limit_bytes=LIMIT, unused=_unused(source, target))
    for bucket in plan.buckets:
        sent: dict[tuple[int, int, int], list[Piece]] = {}
        for rank in range(16):
            for (engine, to), pieces in outgoing(bucket, rank).items():
                sent[rank, engine, to] = pieces
        received = {
            (rank, engine, to): pieces
            for engine in range(2)
            for to in range(4)
            for rank, pieces in incoming(bucket, (engine, to)).items()
        }
        assert sent == received


def test_a_mover_refuses_what_it_does_not_hold(source: Layout, target: Layout) -> None:
    placement = target.placements[0]
    mover = Mover(target, placement, {})
    foreign = Piece("nothing", (0,), (4,), (4,), 8, (0,), (0,))
    with pytest.raises(PlanError, match="does not hold it"):
        mover.read([foreign])
    with pytest.raises(PlanError, match="has 8 bytes, received 3"):
        mover.write([foreign], b"abc")
    with pytest.raises(ConfigError, match="engines >= 1"):
        make_plan(source, target, engines=0)


def test_a_scalar_moves() -> None:
    from syncline.layouts import Block, LocalTensor, Placement

    meta = TensorMeta("s", "F32", ())
    held = (LocalTensor("s", "F32", ()),)
    layout = Layout({"s": plain(meta)}, (Placement(0, held, (Block("s", (), (), "s", 0, ()),)),))
    plan = make_plan(layout, layout)
    ((transfer,),) = plan.buckets
    memory = {"s": np.zeros(1, np.uint32)}
    message = Mover(layout, layout.placements[0], {"s": np.array([7], np.uint32)}).read(
        [transfer.piece]
    )
    Mover(layout, layout.placements[0], memory).write([transfer.piece], message)
    assert memory["s"].tolist() == [7]
