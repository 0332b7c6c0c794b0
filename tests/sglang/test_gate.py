"""The gate on a real SGLang: rounding passes, and what the server computes with other weights is caught."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt", reason="needs the environment of make sglang-env")

import torch
import transformers

import sglang_tiny as tiny
from sglang_pair import PROMPT, Pair
from syncline.errors import VerifyError
from syncline.gate import Committed, Gate, Limits, draw_probes, publish_scores
from syncline.scorers import SglangScorer, TorchScorer
from syncline.serving import ScoredPuller
from syncline.sglang import partial
from syncline.sync.layout import own_history

pytestmark = pytest.mark.slow


class Gated:
    """A server behind a gate, the trainer that it follows, and the trainer's scores of every version."""

    def __init__(self, root: Path) -> None:
        self.pair = Pair(root, tiny.QWEN3)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            root / "base", dtype=torch.bfloat16
        )
        self._ours = TorchScorer(self._model)
        self.probes = draw_probes(256, scorer=self._ours, lengths=(4, 30, 200), continuation=6)
        self.scorer = SglangScorer(self.pair.real.url, timeout_s=60.0)
        self.gate = Gate(self.scorer, self.pair.store, wait_s=0, action="rollback")
        self.puller = ScoredPuller(self.pair.follower, self.pair.store, self.gate)
        self._score()
        self.puller.sync(None)

    def train(self) -> int:
        version = self.pair.train(share=0.05)
        self._score()
        return version

    def committed(self) -> Committed:
        held = self.puller.held()
        assert held is not None
        return Committed(held.version, held.sha256, is_proven=True)

    def _score(self) -> None:
        current = own_history(self.pair.store).target(None)
        self._model.load_state_dict(self.pair.weights)
        publish_scores(self.pair.store, current.version, current.sha256, self._ours, self.probes)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gated]:
    made = Gated(tmp_path_factory.mktemp("gate"))
    yield made
    made.pair.close()


def test_versions_that_are_bit_identical_pass(gated: Gated) -> None:
    for _ in range(5):
        version = gated.train()
        gated.puller.sync(None)
        assert gated.committed().version == version
        assert gated.puller.figures()["syncline_gate_is_flagged"] == 0


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"]
)
def test_one_flipped_high_bit_is_caught(gated: Gated, tmp_path: Path, name: str) -> None:
    pair = gated.pair

    def flipped(name: str) -> object:
        bits = pair.checkpoint.view(name).copy()
        token = gated.probes[0].prompt[0] if "embed" in name else 0
        bits[token * 64] ^= 1 << 14
        return bits

    partial.write(
        tmp_path / "flipped", pair.checkpoint.tensors(), [name], flipped, pair.root / "model"
    )
    pair.control.load_directory(str(tmp_path / "flipped"), 60)
    gate = Gate(gated.scorer, pair.store, limits=gated.gate.limits, wait_s=0, action="flag")
    try:
        assert gate.check(gated.committed()).verdict == "flagged"
    finally:
        pair.control.load_directory(str(pair.root / "model"), 60)
        pair.control.flush(60)
    assert gate.check(gated.committed()).verdict == "passed"


def test_a_flagged_version_is_put_back(gated: Gated) -> None:
    pair, good = gated.pair, gated.committed().version
    version = gated.train()
    right = gated.gate.limits
    gated.gate.limits = Limits(0.0, 0.0, 0.0)  # what no engine is within
    with pytest.raises(VerifyError, match="flagged"):
        gated.puller.sync(None)
    gated.gate.limits = right
    assert gated.committed().version == good
    assert pair.control.label(60) == str(good)
    assert pair.generate(PROMPT, 4)["meta_info"]["weight_version"] == str(good)
    with pytest.raises(VerifyError, match=f"version {version} was flagged"):
        gated.puller.sync(None)
    newer = gated.train()
    gated.puller.sync(None)
    assert gated.committed().version == newer
    pair.check()
