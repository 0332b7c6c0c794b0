"""What every scorer promises, over every scorer there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest

from scoring_servers import FakeSglang, FakeVllm, serving
from syncline.abc import Scorer
from syncline.errors import ConfigError, SynclineError
from syncline.scorers import MemoryScorer, SglangScorer, TorchScorer, VllmScorer
from syncline.types import Probe

VOCABULARY, WIDTH = 24, 12
PROBES = (
    Probe((1, 2, 3), (4, 5, 6)),
    Probe((7,), (7,)),
    Probe(tuple(range(20)), (0, 0, 23, 1)),
)


@dataclass
class Case:
    """A scorer, and how to change the weights that it scores by."""

    scorer: Scorer
    change: Callable[[], None]
    tolerance: float = 1e-12


def matrices() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    return generator.standard_normal((VOCABULARY, WIDTH)), generator.standard_normal(
        (WIDTH, VOCABULARY)
    )


def memory(_stack: ExitStack) -> Case:
    embedding, head = matrices()
    scorer = MemoryScorer(embedding, head)

    def change() -> None:
        head[:, 5] += 1.0
        scorer.reset_cache()

    return Case(scorer, change)


def torch_module(_stack: ExitStack) -> Case:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)

    def change() -> None:
        with torch.no_grad():
            model.lm_head.weight[5] += 1.0

    return Case(TorchScorer(model), change, tolerance=1e-5)


def vllm_server(stack: ExitStack) -> Case:
    behind = memory(stack)
    url = stack.enter_context(serving(FakeVllm(behind.scorer)))
    return Case(VllmScorer(url, timeout_s=20.0), behind.change)


def sglang_server(stack: ExitStack) -> Case:
    behind = memory(stack)
    url = stack.enter_context(serving(FakeSglang(behind.scorer)))
    return Case(SglangScorer(url, timeout_s=20.0), behind.change)


MAKERS: dict[str, Callable[[ExitStack], Case]] = {
    "memory": memory,
    "torch": torch_module,
    "vllm server": vllm_server,
    "sglang server": sglang_server,
}


@pytest.fixture(params=sorted(MAKERS))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with ExitStack() as stack:
        yield MAKERS[request.param](stack)


def test_every_place_of_every_probe_is_scored_in_order(case: Case) -> None:
    scores = case.scorer.score(PROBES, 3)
    assert case.scorer.name
    assert len(scores) == len(PROBES)
    for probe, one in zip(PROBES, scores, strict=True):
        count = len(probe.continuation)
        assert one.logprobs.shape == (count,)
        assert one.logprobs.dtype == np.float64
        assert one.top_tokens.shape == one.top_logprobs.shape == (count, 3)
        assert one.top_tokens.dtype == np.int64
        assert one.top_logprobs.dtype == np.float64


def test_the_most_probable_come_first_and_agree_with_the_scored_token(case: Case) -> None:
    for probe, one in zip(PROBES, case.scorer.score(PROBES, VOCABULARY), strict=True):
        assert (np.diff(one.top_logprobs, axis=1) <= 0).all()
        assert np.allclose(np.exp(one.top_logprobs).sum(axis=1), 1.0, atol=1e-5)
        for place, token in enumerate(probe.continuation):
            ranked = dict(zip(one.top_tokens[place], one.top_logprobs[place], strict=True))
            assert sorted(ranked) == list(range(VOCABULARY))
            assert abs(ranked[token] - one.logprobs[place]) <= case.tolerance


def test_no_ranking_is_made_where_none_is_asked_for(case: Case) -> None:
    one = case.scorer.score(PROBES[:1], 0)[0]
    assert one.top_tokens.shape == one.top_logprobs.shape == (3, 0)
    assert same(one.logprobs, case.scorer.score(PROBES[:1], 4)[0].logprobs, case.tolerance)


def test_a_place_is_scored_by_what_stands_before_it_and_nothing_else(case: Case) -> None:
    whole = Probe((1, 2), (3, 4, 5))
    later = Probe((1, 2, 3), (4, 5))
    other_end = Probe((1, 2), (3, 4, 9))
    a, b, c = case.scorer.score((whole, later, other_end), 2)
    assert same(a.logprobs[1:], b.logprobs, case.tolerance)
    assert same(a.logprobs[:2], c.logprobs[:2], case.tolerance)
    assert np.array_equal(a.top_tokens[1:], b.top_tokens)


def test_probes_together_score_as_they_do_alone(case: Case) -> None:
    together = case.scorer.score(PROBES, 2)
    alone = [case.scorer.score((probe,), 2)[0] for probe in PROBES]
    for one, other in zip(together, alone, strict=True):
        assert same(one.logprobs, other.logprobs, case.tolerance)
    assert case.scorer.score((), 2) == []


def test_the_last_token_is_the_same_by_way_of_the_cache(case: Case) -> None:
    for _ in range(2):
        for one in case.scorer.score(PROBES, 0):
            if one.resumed is not None:
                assert abs(one.resumed - one.logprobs[-1]) <= case.tolerance


def test_scores_follow_the_weights(case: Case) -> None:
    probe = Probe((1, 2), (5, 3))
    before = case.scorer.score((probe,), 1)[0]
    case.change()
    after = case.scorer.score((probe,), 1)[0]
    assert not same(before.logprobs, after.logprobs, 1e-3)
    assert after.resumed is None or not math.isclose(
        after.resumed, before.logprobs[-1], abs_tol=1e-3
    )


@pytest.mark.parametrize("probe", [Probe((1,), (VOCABULARY,)), Probe((10**9,), (1,))])
def test_a_token_that_the_model_does_not_have_is_refused(case: Case, probe: Probe) -> None:
    with pytest.raises(SynclineError):
        case.scorer.score((probe,), 1)


def test_less_than_nothing_is_refused(case: Case) -> None:
    with pytest.raises(ConfigError):
        case.scorer.score(PROBES, -1)


def same(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    return bool(np.allclose(one, other, rtol=0, atol=tolerance))
