"""Real vLLM engines follow random deltas: after each of them they are what a fresh engine would be.

Greedy tokens are compared in float32 alone: in bfloat16 near ties fall otherwise in transformers, from the
first version on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from syncline.layouts import EngineMesh, engine_layout
from vllm_engines import engine, greedy, greedy_of_transformers, plain_kernels
from vllm_layouts import differences, placement_of, places_of
from vllm_models import KINDS, read_config, write_checkpoint
from vllm_trainer import Trainer

_SPEC = find_spec("vllm")
pytestmark = pytest.mark.skipif(
    _SPEC is None or _SPEC.origin is None, reason="no vLLM here: make test-vllm"
)

PROMPTS = [[5, 6, 7, 8, 9] * 3, [2 + (7 * i * i + 3 * i) % 90 for i in range(61)]]
TOKENS = 12
DELTAS, DELTAS_OF_SMOKE = 50, 10
FLIPPED = "model.layers.0.self_attn"


@dataclass(frozen=True)
class Setup:
    """One kind of engine."""

    kind: str
    dtype: str
    kernels: str
    graph: str
    tp: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.dtype}-{self.kernels}-{self.graph}-tp{self.tp}"


SMOKE = [
    Setup("qwen3", "float32", "default", "compiled", 1),
    Setup("llama_tied", "bfloat16", "plain", "eager", 1),
    Setup("qwen3_moe", "float32", "plain", "eager", 1),
    Setup("qwen3_moe", "float32", "default", "eager", 2),
]
MATRIX = [
    setup
    for kind in KINDS
    for dtype in ("float32", "bfloat16")
    for kernels in ("plain", "default")
    for graph in ("eager", "compiled")
    for tp in (1, 2)
    if (setup := Setup(kind, dtype, kernels, graph, tp)) not in SMOKE
]
STARTED_ANEW = [
    Setup("qwen3", "bfloat16", "default", "eager", 2),
    Setup("llama_tied", "float32", "default", "eager", 1),
    Setup("llama_tied", "bfloat16", "plain", "eager", 2),
    Setup("qwen3_moe", "bfloat16", "default", "compiled", 1),
    Setup("qwen3_moe", "float32", "default", "eager", 2),
]
"""Compared once with an engine that is really started from the checkpoint."""


class Following:
    """An engine, and the trainer that it follows."""

    def __init__(self, llm: Any, trainer: Trainer, setup: Setup) -> None:
        self.llm, self.trainer, self.setup = llm, trainer, setup
        self.call("syncline_open", trainer.store)

    def call(self, method: str, *arguments: str) -> list[Any]:
        answers = self.llm.collective_rpc(method, args=arguments)
        for answer in answers:
            if isinstance(answer, dict):
                assert answer.get("error") is None, answer["error"]
        return answers

    def stage(self, version: int, repair: str = "") -> None:
        self.call("syncline_stage", str(version), repair)
        answers = self.wait()
        assert [answer["stage_error"] for answer in answers] == [None] * self.setup.tp

    def wait(self) -> list[Any]:
        """Return how the workers stand when none is staging any more."""
        while True:
            answers = self.call("syncline_status")
            if all(answer["stage"] != "staging" for answer in answers):
                return answers
            time.sleep(0.01)

    def repair(self, version: int) -> None:
        self.follow(version, "repair")

    def follow(self, version: int, repair: str = "") -> None:
        self.stage(version, repair)
        self.call("syncline_apply")
        self.call("syncline_finish")
        self.llm.reset_prefix_cache()

    def check(self) -> None:
        """Every worker holds what a fresh one would, and knows the fingerprint of that."""
        for answer in self.call("tested_state", str(self.trainer.path)):
            assert answer["differences"] == []
            kept, read = answer["shares"]
            assert kept == read

    def check_tokens(self) -> None:
        if self.setup.dtype == "float32":
            found = greedy(self.llm, PROMPTS, TOKENS)
            assert found == greedy_of_transformers(self.trainer.path, PROMPTS, TOKENS)


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(setup, id=str(setup)) for setup in SMOKE),
        *(pytest.param(setup, id=str(setup), marks=pytest.mark.slow) for setup in MATRIX),
    ],
)
def following(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Following]:
    setup: Setup = request.param
    directory = tmp_path_factory.mktemp("model")
    base: Path = directory / "base"
    write_checkpoint(setup.kind, base, dtype=setup.dtype)
    trainer = Trainer(base, directory)
    is_eager = setup.graph == "eager"
    with (
        plain_kernels() if setup.kernels == "plain" else nullcontext(),
        engine(base, dtype=setup.dtype, is_eager=is_eager, tp=setup.tp) as llm,
    ):
        found = Following(llm, trainer, setup)
        yield found
        # pytest keeps what it was given until another test runs, and experts keep a port.
        del llm, found.llm


@pytest.fixture
def replicated(following: Following) -> Following:
    """An engine of two workers with one head of keys and values, which both hold in memory that can be read."""
    setup = following.setup
    if (setup.kind, setup.kernels, setup.tp) != ("llama_tied", "plain", 2):
        pytest.skip("no tensor is held twice, or it is packed")
    return following


def test_a_replica_that_is_wrong_at_the_start_is_refused_and_repaired(
    replicated: Following,
) -> None:
    """First of all tests: what is read later is what was changed."""
    version = replicated.trainer.version
    replicated.stage(version)
    replicated.call("tested_flip", "1", FLIPPED)
    flipped = replicated.call("tested_hashes")
    answers = replicated.llm.collective_rpc("syncline_apply")
    words = f"worker 1 of 2: VerifyError: tensor '{FLIPPED}.k_proj.weight': this worker's own copy"
    assert all(words in answer["error"] for answer in answers)
    assert replicated.call("tested_hashes") == flipped
    replicated.repair(version)
    replicated.check()
    replicated.check_tokens()


def test_random_deltas(following: Following, request: pytest.FixtureRequest) -> None:
    is_smoke = "not slow" in request.config.option.markexpr
    following.follow(following.trainer.version)
    following.check()
    following.check_tokens()
    before = greedy(following.llm, PROMPTS, TOKENS)
    for _ in range(DELTAS_OF_SMOKE if is_smoke else DELTAS):
        following.follow(following.trainer.step())
        following.check()
        following.check_tokens()
    assert greedy(following.llm, PROMPTS, TOKENS) != before


def test_several_deltas_at_once(following: Following) -> None:
    for _ in range(3):
        version = following.trainer.step()
    following.follow(version)
    following.check()
    following.check_tokens()


def test_a_write_that_fails_on_any_worker_restores_all_bit_for_bit(following: Following) -> None:
    following.follow(following.trainer.step())
    following.check()
    tokens = greedy(following.llm, PROMPTS, TOKENS)
    kept = (following.trainer.path / "model.safetensors").read_bytes()
    for rank in range(following.setup.tp):
        version = following.trainer.step()
        newer = (following.trainer.path / "model.safetensors").read_bytes()
        following.stage(version)
        following.llm.collective_rpc("tested_break", args=(str(rank),))
        answers = following.llm.collective_rpc("syncline_apply")
        assert all("injected" in answer["error"] for answer in answers)
        (following.trainer.path / "model.safetensors").write_bytes(kept)
        for answer in following.call("tested_state", str(following.trainer.path)):
            assert answer["differences"] == []
        following.llm.reset_prefix_cache()
        assert greedy(following.llm, PROMPTS, TOKENS) == tokens
        (following.trainer.path / "model.safetensors").write_bytes(newer)
    following.follow(version)
    following.check()
    following.check_tokens()


def test_a_replica_that_changed_is_noticed_by_the_next_change_of_it_and_repaired(
    replicated: Following,
) -> None:
    replicated.follow(replicated.trainer.step())
    replicated.call("tested_flip", "1", FLIPPED)
    version = replicated.trainer.step()
    replicated.call("syncline_stage", str(version))
    right, wrong = replicated.wait()
    assert right["stage_error"] is None
    assert "before the update" in wrong["stage_error"]
    replicated.repair(version)
    replicated.check()
    replicated.check_tokens()


def test_what_vllms_own_reload_breaks_is_noticed_and_repaired(following: Following) -> None:
    """vLLM 0.32 on a CPU puts unpacked experts where its kernel wants packed ones, and reports success."""
    if (following.setup.kind, following.setup.kernels) != ("qwen3_moe", "default"):
        pytest.skip("vLLM reloads these weights right")
    following.follow(following.trainer.step())
    following.check()
    tokens = greedy(following.llm, PROMPTS, TOKENS)
    path = str(following.trainer.path)
    following.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    following.llm.reset_prefix_cache()
    assert greedy(following.llm, PROMPTS, TOKENS) != tokens
    version = following.trainer.step()
    following.call("syncline_stage", str(version))
    answers = following.wait()
    assert all("before the update" in answer["stage_error"] for answer in answers)
    following.repair(version)
    following.check()
    following.check_tokens()


def test_the_tables_say_what_was_learned(following: Following) -> None:
    """Placements for planning, at this size, against what the real loader does."""
    config = read_config(following.trainer.path)
    layout = engine_layout(config, EngineMesh(tp=following.setup.tp))
    answers = following.call("tested_placement")
    for rank, (answer, table) in enumerate(zip(answers, layout.placements, strict=True)):
        catalog = {
            name: replace(tensor, grid=tuple(answer["grids"][name]))
            for name, tensor in layout.catalog.items()
        }
        learned = places_of(catalog, placement_of(answer, rank))
        assert differences(learned, places_of(layout.catalog, table)) == []
        for tensor in table.tensors:
            _, shape, padding = answer["tensors"][tensor.name]
            assert (tuple(shape), padding) == (tensor.shape, tensor.padding), tensor.name


def test_nothing_is_loaded_whole(following: Following) -> None:
    for answer in following.call("tested_placement"):
        assert answer["unmapped"] == {}


def test_no_layer_is_kept_by_what_vllm_describes_it_with(following: Following) -> None:
    assert following.call("tested_kept") == [[]] * following.setup.tp


def test_kernels_are_those_that_the_setup_names(following: Following) -> None:
    for answer in following.call("tested_placement"):
        assert bool(answer["packed"]) == (following.setup.kernels == "default")


@pytest.mark.slow
def test_an_engine_started_from_the_trainers_checkpoint_holds_the_same(
    following: Following,
) -> None:
    """In processes of its own; elsewhere the second model is loaded in the workers that follow."""
    if following.setup not in STARTED_ANEW:
        pytest.skip("a second model in the workers stands for it")
    following.follow(following.trainer.step())
    setup = following.setup
    done = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).parents[1] / "vllm_fresh.py")),
            *(following.trainer.path, setup.dtype, setup.kernels, setup.graph, str(setup.tp)),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    fresh = json.loads(done.stdout.splitlines()[-1])
    assert fresh["tokens"] == greedy(following.llm, PROMPTS, TOKENS)
    assert fresh["hashes"] == following.call("tested_hashes")
    assert len(fresh["hashes"]) == setup.tp
