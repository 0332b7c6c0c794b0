"""Records, summaries and pictures of plans."""

from __future__ import annotations

import json

import numpy as np
import pytest

from syncline.errors import ConfigError, PlanError
from syncline.layouts import EngineMesh, MegatronMesh, engine_layout, megatron_layout
from syncline.plan import Load, heat_map, load_of, make_plan, read_sizes, record, records, summary

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_a_record_names_every_place() -> None:
    source = megatron_layout(CONFIG, MegatronMesh(4, tp=2), padded_vocab=128)
    target = engine_layout(CONFIG, EngineMesh(2))
    found = record("model.layers.1.self_attn.k_proj.weight", source, target)
    assert json.loads(json.dumps(found)) == found
    assert (found["shape"], found["dtype"], found["nbytes"]) == ([16, 32], "BF16", 1024)
    assert [place["rank"] for place in found["sources"]] == [0, 2, 1, 3]
    assert found["sources"][2] == {
        "rank": 1,
        "replicas": [1, 3],
        "box": "[8:16, 0:32]",
        "cuts": [{"axis": 0, "start": 8, "count": 8, "of": 16}],
        "experts": None,
        "dtype": "BF16",
        "transforms": [],
        "local": "0/decoder.layers.1.self_attention.linear_qkv.weight",
        "local_shape": [32, 32],
        "offset": 512,
        "strides": [32, 1],
        "copies": 2,
        "is_alias": False,
    }
    assert found["targets"][0]["local"] == "model.layers.1.self_attn.qkv_proj.weight"
    every = list(records(source, target))
    assert [one["name"] for one in every] == list(source.catalog)
    assert found in every
    with pytest.raises(PlanError, match="in neither layout"):
        record("model.nothing", source, target)


def test_a_record_says_what_is_done_to_a_tensor() -> None:
    """gpt-oss stacks its experts inputs first, gate and up column by column."""
    config = {**CONFIG, "model_type": "gpt_oss", "num_local_experts": 4}
    source, target = (
        megatron_layout(config, MegatronMesh(2, ep=2)),
        engine_layout(config, EngineMesh()),
    )
    found = record("model.layers.0.mlp.experts.gate_up_proj", source, target)
    assert {tuple(place["transforms"]) for place in found["sources"]} == {
        ("transposed", "interleaved")
    }
    assert sorted(place["experts"] for place in found["sources"] if place["rank"] == 1) == [
        *([2], [2], [3], [3])
    ]
    down = record("model.layers.0.mlp.experts.down_proj", source, target)["sources"]
    assert {tuple(place["transforms"]) for place in down} == {("transposed",)}


def test_a_summary_adds_up() -> None:
    source = megatron_layout(CONFIG, MegatronMesh(4, tp=2), padded_vocab=128)
    target = engine_layout(CONFIG, EngineMesh(2))
    plan = make_plan(source, target, engines=3)
    load = load_of(plan)
    found = summary(plan, load, source, target)
    assert json.loads(json.dumps(found)) == found
    assert found["moved_bytes"] == 3 * sum(
        block.count * 2 for placement in target.placements for block in placement.blocks
    )
    assert found["received_bytes"]["mean"] * 6 == found["moved_bytes"]
    # Both sides pad the vocabulary to 128 rows: equal shards, and the first side is named.
    assert found["tightest"]["bytes"] > found["staged_bytes"] > 0


def test_a_picture_has_a_shade_for_every_link() -> None:
    links = np.zeros((40, 70), np.int64)
    links[39, 69] = 1000
    links[0, 0] = 1
    lines = heat_map(Load(links, 1001, 0, 0), rows=10, columns=7).split("\n")
    assert len(lines) == 10
    assert lines[0] == "."
    assert lines[9] == "      @"
    assert set("".join(lines[1:9])) <= {" "}


def test_sizes_are_read_strictly() -> None:
    assert read_sizes("", {"tp": 1}) == {"tp": 1}
    for wrong in ("tp", "tp=", "tp=-1", "qp=2", "tp=2 pp=3"):
        with pytest.raises(ConfigError, match="is not NAME=NUMBER"):
            read_sizes(wrong, {"tp": 1, "pp": 1})
