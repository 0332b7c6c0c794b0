"""The figures against a slow computation over the whole vocabulary, and what is never reported."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError, FormatError
from syncline.gate import Deviation, Limits, deviation, draw_probes, learn
from syncline.gate.deviation import REST, divergence
from syncline.scorers import MemoryScorer
from syncline.types import Probe, Scores

VOCABULARY = 12
PROBE = Probe((1,), (2, 3))


def distribution(rng: np.random.Generator, spread: float) -> np.ndarray:
    logits = spread * rng.standard_normal(VOCABULARY)
    return logits - np.log(np.exp(logits).sum())


def known(row: np.ndarray, top: int) -> dict[int, float]:
    return {int(token): float(row[token]) for token in np.argsort(-row)[:top]}


@given(st.integers(0, 2**32), st.integers(0, VOCABULARY), st.floats(0.1, 6))
def test_the_divergence_is_a_lower_bound_and_exact_over_the_whole_vocabulary(
    seed: int, top: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    p, q = distribution(rng, spread), distribution(rng, spread)
    token = int(rng.integers(VOCABULARY))
    exact = float(np.sum(np.exp(p) * (p - q)))
    found = divergence(token, p[token], known(p, top), q[token], known(q, top))
    slack = 40 * REST
    assert 0 <= found <= exact + slack
    if top == VOCABULARY:
        assert abs(found - exact) <= slack
    assert divergence(token, p[token], known(p, top), p[token], known(p, top)) <= slack


def test_the_divergence_of_certainties_is_finite() -> None:
    found = divergence(1, 0.0, {1: 0.0}, -math.inf, {2: 0.0})
    assert 1e3 < found < math.inf
    assert divergence(1, -math.inf, {2: 0.0}, 0.0, {1: 0.0}) > 10


def scores(logprobs: list[float], resumed: float | None = None) -> Scores:
    values = np.array(logprobs, np.float64)
    tokens = np.array(PROBE.continuation, np.int64)[:, None]
    return Scores(values, tokens, values[:, None], resumed)


def test_figures_of_a_worked_example() -> None:
    found = deviation([PROBE] * 2, [scores([-1.0, -2.0])] * 2, [scores([-1.0, -2.5], -2.75)] * 2)
    assert (found.positions, found.not_finite) == (4, 0)
    assert (found.max_difference, found.mean_difference) == (0.5, 0.25)
    assert found.resumed_difference == 0.75
    assert (found.probe, found.place) == (0, 1)
    p, q = math.exp(-2.0), math.exp(-2.5)
    by_hand = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert math.isclose(found.kl, by_hand / 2)
    with pytest.raises(FrozenInstanceError):
        found.kl = 0.0


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_is_counted_and_in_no_mean(bad: float) -> None:
    found = deviation([PROBE], [scores([-1.0, -2.0])], [scores([bad, -2.5])])
    assert (found.not_finite, found.max_difference, found.mean_difference) == (1, 0.5, 0.5)
    assert (found.probe, found.place) == (0, 0)
    all_bad = deviation([PROBE], [scores([-1.0, -2.0])], [scores([bad, bad], bad)])
    assert (all_bad.not_finite, all_bad.max_difference, all_bad.resumed_difference) == (
        2,
        0.0,
        None,
    )
    for each in (found, all_bad):
        assert Limits(9.0, 9.0, 9.0).exceeded(each)
        assert learn(each) is None


def test_a_resumed_nan_alone_is_counted() -> None:
    found = deviation([PROBE], [scores([-1.0, -2.0])], [scores([-1.0, -2.0], math.nan)])
    assert found.not_finite == 1
    assert Limits(9.0, 9.0, 9.0).exceeded(found)


@pytest.mark.parametrize(
    ("probes", "trainer", "engine"),
    [
        ([], [], []),
        ([PROBE], [scores([-1.0, -2.0])], []),
        ([PROBE], [scores([-1.0, -2.0])], [scores([-1.0, -2.0])] * 2),
        ([Probe((1,), (2, 3, 4))], [scores([-1.0, -2.0])], [scores([-1.0, -2.0])]),
        ([PROBE], [scores([math.nan, -2.0])], [scores([-1.0, -2.0])]),
    ],
)
def test_scores_of_something_else_are_refused(probes: list, trainer: list, engine: list) -> None:
    with pytest.raises(FormatError):
        deviation(probes, trainer, engine)


SOME = Deviation(64, 0, 0.1, 0.02, 0.001, 0.1, 0, 0)


def test_limits_have_margins_and_floors_and_a_file() -> None:
    limits = learn(SOME)
    assert limits == Limits(0.1 * 6.0, 0.06, 0.001 * 9.0)
    assert limits.exceeded(SOME) == ()
    for name, value in (("max_difference", 0.61), ("mean_difference", 0.061), ("kl", 0.0091)):
        assert limits.exceeded(replace(SOME, **{name: value}))[0].startswith(name)
    assert limits.exceeded(replace(SOME, resumed_difference=0.61))
    assert limits.exceeded(replace(SOME, kl=math.nan))
    assert learn(Deviation(64, 0, 0.0, 0.0, 0.0, None, 0, 0)) == Limits(5e-5, 5e-5, 5e-6)
    assert Limits.load(limits.dump(), "limits") == limits


@pytest.mark.parametrize(
    "found",
    [
        replace(SOME, mean_difference=0.51, max_difference=9.0),
        replace(SOME, not_finite=1),
        replace(SOME, resumed_difference=0.61),
    ],
)
def test_what_rounding_cannot_explain_is_not_learned(found: Deviation) -> None:
    assert learn(found) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        Limits(1.0, 1.0, 1.0).dump().replace(b"1.0", b"-1.0", 1),
        Limits(1.0, 1.0, 1.0).dump().replace(b"1.0", b"NaN", 1),
        Limits(1.0, 1.0, 1.0).dump().replace(b'"kl"', b'"cl"', 1),
        Limits(1.0, 1.0, 1.0).dump().replace(b'"format_version":1', b'"format_version":9'),
    ],
)
def test_another_file_is_not_taken_for_limits(raw: bytes) -> None:
    with pytest.raises(FormatError):
        Limits.load(raw, "limits.json")


def test_probes_are_the_same_for_the_same_seed_and_inside_the_vocabulary() -> None:
    probes = draw_probes(30, lengths=(3, 5), continuation=2, seed=4)
    assert probes == draw_probes(30, lengths=(3, 5), continuation=2, seed=4)
    assert probes != draw_probes(30, lengths=(3, 5), continuation=2, seed=5)
    assert [(len(one.prompt), len(one.continuation)) for one in probes] == [(3, 2), (5, 2)]
    assert all(0 <= token < 30 for one in probes for token in one.tokens)


def test_a_scorer_draws_continuations_that_it_finds_probable() -> None:
    rng = np.random.default_rng(2)
    scorer = MemoryScorer(2 * rng.standard_normal((30, 8)), rng.standard_normal((8, 30)))
    options = {"lengths": (3, 5), "continuation": 12, "seed": 4}
    probes = draw_probes(30, scorer=scorer, **options)
    assert probes == draw_probes(30, scorer=scorer, **options)
    own = np.concatenate([one.logprobs for one in scorer.score(probes, 0)])
    random = np.concatenate([one.logprobs for one in scorer.score(draw_probes(30, **options), 0)])
    assert own.mean() > random.mean() + 1
    assert [len(one.prompt) for one in probes] == [3, 5]
    assert {len(one.continuation) for one in probes} == {12}


@pytest.mark.parametrize(
    "options", [{"vocabulary": 0}, {"lengths": ()}, {"lengths": (3, 0)}, {"continuation": 0}]
)
def test_probes_that_cannot_be_drawn_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError):
        draw_probes(**{"vocabulary": 5, **options})


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [((), (1,)), ((1,), ()), ((-1,), (1,)), ((1,), (True,)), ((1.0,), (1,))],
)
def test_a_probe_holds_token_ids(prompt: tuple, continuation: tuple) -> None:
    with pytest.raises(ConfigError):
        Probe(prompt, continuation)
