"""Scores of the real SGLang on the CPU are those of transformers, place by place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang.srt", reason="needs the environment of make sglang-env")

import torch
import transformers

import sglang_tiny as tiny
from sglang_real import SglangServer
from syncline.errors import TransportError
from syncline.gate import deviation, draw_probes, learn
from syncline.scorers import SglangScorer, TorchScorer
from syncline.types import Probe


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("scores") / "base", tiny.MODELS["qwen3"], seed=1)


@pytest.fixture(scope="module")
def url(base: Path) -> Iterator[str]:
    server = SglangServer(base, base.with_name("server.log"))
    try:
        yield server.wait().url
    finally:
        server.close()


@pytest.fixture(scope="module")
def both(base: Path, url: str) -> tuple[Any, SglangScorer]:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    return TorchScorer(model), SglangScorer(url, timeout_s=60.0)


def test_limits_can_be_learned_and_hold_for_other_texts(both: tuple[Any, SglangScorer]) -> None:
    trainer, engine = both
    limits = None
    for seed in range(3):
        probes = draw_probes(256, scorer=trainer, lengths=(4, 30, 200), seed=seed)
        # The second time the prefix cache has the prompt.
        for _ in range(2):
            found = deviation(probes, trainer.score(probes, 20), engine.score(probes, 20))
            assert found.resumed_difference is not None
            limits = learn(found) if limits is None else limits
            assert limits is not None
            assert limits.exceeded(found) == ()


def test_scores_are_of_these_very_tokens(both: tuple[Any, SglangScorer]) -> None:
    trainer, engine = both
    probes = (Probe((5, 6, 7), (9, 200)), Probe((3,), (3,)))
    for one, other in zip(trainer.score(probes, 0), engine.score(probes, 0), strict=True):
        assert np.abs(one.logprobs - other.logprobs).max() < 0.2
        assert abs(one.logprobs[-1] - other.resumed) < 0.2


def test_a_token_that_the_model_does_not_have_is_an_error(url: str) -> None:
    """The last test of its server, which answers with an error, hangs or dies of it."""
    impatient = SglangScorer(url, timeout_s=10.0)
    with pytest.raises(TransportError):
        impatient.score((Probe((1, 2), (300,)),), 1)
