"""The real SGLang on the CPU: its own checksums say that changes in place are a dense update and a fresh start."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="needs the environment of make sglang-env")

from safetensors.torch import load_file

import sglang_probe
import sglang_tiny as tiny
import syncline
from sglang_pair import PROMPT, Pair
from syncline.engines import CheckpointDir
from syncline.errors import LayoutError, SynclineError
from syncline.layouts import EngineMesh, engine_layout
from syncline.sglang import spans
from syncline.sglang.routes import Route
from syncline.sglang.server import SglangServer

KINDS = ("qwen3-1", "qwen3-2", "qwen3_moe-1", "qwen3_moe-2")


@pytest.fixture(scope="module", params=["qwen3-1"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    model, tp = request.param.rsplit("-", 1)
    made = Pair(tmp_path_factory.mktemp(request.param), tiny.MODELS[model], int(tp))
    yield made
    made.close()


def test_checksums_after_each_change_in_place_are_those_of_a_dense_update(pair: Pair) -> None:
    pair.follow(5)
    assert pair.follower.figures()["syncline_dense_tensors"] == 0


@pytest.mark.parametrize(
    "route, name",
    [
        ("disk", "from disk"),
        ("memory", "from memory"),
        ("distributed", "from distributed"),
    ],
)
def test_whole_tensors_give_the_same_by_every_route(pair: Pair, route: Route, name: str) -> None:
    follower = pair.another(route=route)
    follower.sync()
    for _ in range(2):
        version = pair.train()
        done = follower.sync()
        assert done is not None and done.route == name
        assert pair.control.label(60) == str(version)
        pair.check()
    pair.another()


def test_a_retracted_request_ends_with_two_spans_and_the_new_weights_tokens(pair: Pair) -> None:
    pair.follower.sync()
    before = pair.control.label(60)
    version = pair.train(share=0.3)
    answers = pair.stream(PROMPT, 1200)
    next(answers)  # it runs
    done: list[Any] = []
    updating = threading.Thread(target=lambda: done.append(pair.follower.sync()))
    updating.start()
    last = list(answers)[-1]
    updating.join()
    assert done[0] is not None
    output = last["output_ids"]
    found = spans.of_answer(last, len(output))
    assert [span.label for span in found] == [before, str(version)]
    seam = found[1].start
    assert 0 < seam < len(output)
    fresh = pair.generate(PROMPT + output[:seam], len(output) - seam)
    assert fresh["output_ids"] == output[seam:]
    assert [s.version for s in spans.of_answer(fresh, len(output) - seam)] == [version]


def test_a_cached_prompt_is_computed_again_after_an_update(pair: Pair) -> None:
    pair.follower.sync()
    old = pair.generate(PROMPT, 40)
    assert pair.generate(PROMPT, 1)["meta_info"]["cached_tokens"] > 0
    pair.train(share=0.5)
    pair.follower.sync()
    new = pair.generate(PROMPT, 40)
    assert new["meta_info"]["cached_tokens"] == 0
    pair.control.flush(60)
    assert pair.generate(PROMPT, 40)["output_ids"] == new["output_ids"] != old["output_ids"]


def test_a_server_of_another_shape_is_refused_and_lives_on(pair: Pair, tmp_path: Path) -> None:
    """SGLang itself would die of it."""
    other = tiny.write(tmp_path / "base", {**tiny.QWEN3, "intermediate_size": 64}, seed=2)
    store = syncline.open_store(str(tmp_path / "run"))
    syncline.Publisher(store).publish(load_file(other / "model.safetensors"))
    follower = SglangServer(
        pair.control, store, CheckpointDir(tmp_path / "model"), tmp_path / "staging"
    )
    label, before = pair.control.label(60), pair.control.checksums(60)
    pair.follower.close()
    with pytest.raises(LayoutError, match="gate_proj"):
        follower.sync()
    follower.close()
    assert pair.control.label(60) == label
    assert pair.control.checksums(60) == before


def test_a_killed_server_comes_back_at_the_version_it_is_said_to_have(pair: Pair) -> None:
    pair.follower.sync()
    pair.train()
    pair.follower.sync()
    before = pair.control.checksums(60)
    pair.real.close()
    assert not pair.follower.is_serving()
    assert pair.follower.held() is None
    with pytest.raises(SynclineError):
        pair.follower.sync()
    pair.start()
    assert pair.control.checksums(60) == before  # a fresh start is the same weights
    version = pair.train()
    pair.follower.sync()
    assert pair.control.label(60) == str(version)
    pair.check()


@pytest.mark.slow
def test_the_plugin_is_a_second_door(tmp_path: Path) -> None:
    """Found through the metadata of an installed distribution, as SGLang looks for plugins."""
    found = tmp_path / "path" / "syncline_hook-0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: syncline-hook\nVersion: 0\n")
    (found / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nsyncline_hook = syncline.sglang.plugin:register\n"
    )
    pair = Pair(tmp_path, tiny.QWEN3, 2, plugins=found.parent)
    try:
        follower = pair.another(route="plugin")
        follower.sync()
        for _ in range(3):
            version = pair.train()
            done = follower.sync()
            assert done is not None and done.route == "in place"
            assert pair.control.label(60) == str(version)
            pair.check()
    finally:
        pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*KINDS, "deepseek_v3-1"], indirect=True, scope="module")
def test_placements_learned_of_sglangs_loaders_are_those_of_the_tables(pair: Pair) -> None:
    config = json.loads((pair.root / "model" / "config.json").read_text())
    metas = pair.checkpoint.tensors().values()
    layout = engine_layout(config, EngineMesh(pair.tp), checkpoint=metas, engine="sglang")
    wanted = [sglang_probe.scattered(layout, placement) for placement in layout.placements]
    assert pair.probe(sglang_probe.PLACED) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("pair", KINDS, indirect=True, scope="module")
def test_fifty_random_deltas_are_fifty_dense_updates_and_a_fresh_start(pair: Pair) -> None:
    pair.follow(50)
    assert pair.follower.figures()["syncline_dense_tensors"] == 0
    pair.train(share=0.5)
    pair.follower.sync()
    in_place = pair.generate(PROMPT, 30)
    before = pair.control.checksums(120)
    pair.real.close()
    pair.start()
    assert pair.control.checksums(120) == before
    fresh = pair.generate(PROMPT, 30)
    assert fresh["output_ids"] == in_place["output_ids"]
    scores = [answer["meta_info"]["output_token_logprobs"] for answer in (fresh, in_place)]
    assert scores[0] == scores[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [(), ("--ep-num-redundant-experts", "2", "--ep-dispatch-algorithm", "dynamic")],
    ids=["each_once", "redundant"],
)
def test_experts_that_sglang_balances_anew_are_found_where_they_are(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """It moves them within the same memory, so that nothing but its own map tells."""
    by_itself = ("--enable-eplb", "--eplb-rebalance-num-iterations", "1000000")
    pair = Pair(tmp_path, tiny.QWEN3_MOE, 2, arguments=("--ep-size", "2", *by_itself, *arguments))
    try:
        pair.follow(2)
        for _ in range(3):
            before = pair.control.checksums(60)
            [noted, *others] = pair.probe(sglang_probe.REBALANCED)
            assert noted["before"] != noted["now"]
            assert all(other == noted for other in others)
            assert pair.control.checksums(60) != before
            pair.follow(1)
        assert pair.follower.figures()["syncline_dense_tensors"] == 0
    finally:
        pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["deepseek_v3-1"], indirect=True, scope="module")
def test_what_deepseek_derives_from_its_weights_follows_them(pair: Pair) -> None:
    """Its absorbed projections have no checksum, and no build of its kernels runs here: they are read."""
    pair.follower.sync()
    seen = [pair.probe(sglang_probe.DERIVED)[0]]
    assert len(seen[0]) == 2 * tiny.DEEPSEEK_V3["num_hidden_layers"]
    for _ in range(20):
        pair.train()
        done = pair.follower.sync()
        assert done is not None and done.route == "in place"
        assert pair.follower.figures()["syncline_dense_tensors"] == 0
        found = pair.probe(sglang_probe.DERIVED)[0]
        assert found != seen[-1]
        pair.check()
        assert pair.probe(sglang_probe.DERIVED)[0] == found
        seen.append(found)
    # A half of a pair that SGLang joins: the other half must come with it, or it is dropped.
    half = "model.layers.1.self_attn.q_a_proj.weight"
    routes: tuple[Route, ...] = ("disk", "memory")
    for route in routes:
        follower = pair.another(route=route)
        follower.sync()
        pair.train(names=[half])
        old = pair.control.checksums(60)
        done = follower.sync()
        assert done is not None and done.checksums != old
        pair.check()
    pair.another()
    before = pair.control.checksums(120)
    pair.real.close()
    pair.start()
    assert pair.control.checksums(120) == before
    assert pair.probe(sglang_probe.DERIVED)[0] == seen[-1]
