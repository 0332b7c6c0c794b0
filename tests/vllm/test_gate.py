"""The gate on a real vLLM: rounding passes, and what fingerprints do not see is caught."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import syncline
from syncline.gate import Committed, Gate, draw_probes, publish_scores
from syncline.scorers import TorchScorer, VllmOfflineScorer
from syncline.vllm.commit import CommitOptions, bring
from syncline.vllm.control import OfflineControl
from vllm_engines import engine, model_of, plain_kernels
from vllm_models import VOCAB, write_checkpoint
from vllm_trainer import Trainer

_SPEC = find_spec("vllm")
pytestmark = pytest.mark.skipif(
    _SPEC is None or _SPEC.origin is None, reason="no vLLM here: make test-vllm"
)

LENGTHS = (4, 30, 300)
EMBEDDING = "model.embed_tokens.weight"


class Followed:
    """A vLLM in this process, the trainer that it follows, and the trainer's scores."""

    def __init__(self, llm: Any, trainer: Trainer) -> None:
        self.llm, self.trainer = llm, trainer
        self.store = syncline.open_store(trainer.store)
        self.control = OfflineControl(llm)
        self.scorer = VllmOfflineScorer(llm)
        self.probes = draw_probes(VOCAB, scorer=self.ours(), lengths=LENGTHS, continuation=6)
        self.scored = 0

    def ours(self) -> TorchScorer:
        """Return what scores by the trainer's newest weights."""
        import transformers

        return TorchScorer(transformers.AutoModelForCausalLM.from_pretrained(self.trainer.path))

    def sync(self, version: int) -> None:
        bring(self.control, self.trainer.store, version, CommitOptions())

    def committed(self, version: int) -> Committed:
        """Return what every worker says that it holds; publish the trainer's scores of it."""
        [status] = self.control.call("syncline_status", timeout_s=60)
        assert status["version"] == version
        if version > self.scored:
            publish_scores(self.store, version, status["sha256"], self.ours(), self.probes)
            self.scored = version
        return Committed(version, status["sha256"], is_proven=True)

    def step(self) -> Committed:
        version = self.trainer.step()
        self.sync(version)
        return self.committed(version)

    def learned(self) -> Gate:
        """Return a gate that has its limits from a version that is new."""
        gate = Gate(self.scorer, self.store, wait_s=0)
        assert gate.check(self.step()).verdict == "learned"
        return gate

    def weight(self, name: str) -> Any:
        """Return a live parameter, flat, as integers of its bits."""
        import torch

        return dict(model_of(self.llm).named_parameters())[name].data.view(torch.int32)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint("qwen3", directory / "base")
    trainer = Trainer(directory / "base", directory)
    with plain_kernels(), engine(directory / "base") as llm:
        yield Followed(llm, trainer)


def test_versions_that_are_bit_identical_pass(followed: Followed) -> None:
    gate = followed.learned()
    reports = [gate.check(followed.step()) for _ in range(8)]
    assert [report.verdict for report in reports] == ["passed"] * 8
    for report in reports:
        assert report.deviation.positions == 18
        assert report.deviation.max_difference < 1e-4
        assert report.deviation.resumed_difference is not None


def test_scores_are_those_of_this_very_place_and_token(followed: Followed) -> None:
    followed.step()
    for one, other in zip(
        followed.ours().score(followed.probes, 5),
        followed.scorer.score(followed.probes, 5),
        strict=True,
    ):
        assert np.abs(one.logprobs - other.logprobs).max() < 1e-4
        assert np.array_equal(one.top_tokens, other.top_tokens)
        assert abs(other.resumed - other.logprobs[-1]) < 1e-4


@pytest.mark.parametrize(
    "name", [EMBEDDING, "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
)
def test_one_flipped_high_bit_is_caught(followed: Followed, name: str) -> None:
    gate = followed.learned()
    second = followed.step()
    bits = followed.weight(name)
    place = (
        (followed.probes[0].prompt[0], 3)[: bits.dim()] if name == EMBEDDING else (0,) * bits.dim()
    )
    bits[place] ^= 1 << 30
    try:
        report = gate.check(second)
    finally:
        bits[place] ^= 1 << 30
    assert report.verdict == "flagged"
    assert gate.refuses(second.manifest_sha256)
    followed.llm.reset_prefix_cache()
    assert gate.check(second).verdict == "passed"


def test_a_prefix_cache_of_the_old_weights_is_caught(followed: Followed) -> None:
    gate = followed.learned()
    version = followed.trainer.step(share=0.2)
    kept = followed.control.reset_caches
    followed.control.reset_caches = lambda timeout_s: None
    try:
        followed.sync(version)
        report = gate.check(followed.committed(version))
    finally:
        followed.control.reset_caches = kept
    assert report.verdict == "flagged"
    assert report.reason.startswith("resumed_difference")
    assert report.deviation.max_difference < 1e-4
    followed.llm.reset_prefix_cache()
    assert gate.check(followed.committed(version)).verdict == "passed"


def test_a_shard_that_stayed_behind_is_caught(followed: Followed) -> None:
    gate = followed.learned()
    bits = followed.weight("model.layers.1.mlp.gate_up_proj.weight")
    half = bits.shape[0] // 2
    old = bits[:half].clone()
    second = followed.step()
    new = bits[:half].clone()
    bits[:half] = old
    try:
        report = gate.check(second)
    finally:
        bits[:half] = new
    assert report.verdict == "flagged"
    assert gate.check(second).verdict == "passed"


def test_a_flagged_version_is_rolled_back(followed: Followed) -> None:
    gate = Gate(followed.scorer, followed.store, wait_s=0, action="rollback")
    first = followed.step()
    assert gate.check(first, followed.sync).verdict == "learned"
    second = followed.step()
    right = gate.limits
    gate.limits = type(right)(0.0, 0.0, 0.0)  # what no engine is within
    report = gate.check(second, followed.sync)
    gate.limits = right
    assert (report.verdict, report.rolled_back_to) == ("flagged", first.version)
    assert gate.check(followed.committed(first.version), followed.sync).verdict == "passed"
    followed.sync(second.version)
    assert gate.check(followed.committed(second.version), followed.sync).verdict == "passed"
