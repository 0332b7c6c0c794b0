"""The gate on a trainer and an engine: what passes, what is caught, and what is never called good."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gate_pair import PROBES, Pair
from syncline.errors import ConfigError, FormatError
from syncline.gate import Committed, Gate, Limits, publish_scores
from syncline.scorers import MemoryScorer
from syncline.types import Scores

WIDE = Limits(max_difference=1e-3, mean_difference=1e-3, kl=1e-3)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_the_first_proven_version_gives_the_limits_and_the_next_passes(pair: Pair) -> None:
    first = pair.publish()
    gate = Gate(pair.scorer, pair.store)
    learned = gate.check(first)
    assert (learned.verdict, learned.limits) == ("learned", gate.limits)
    assert learned.deviation is not None and 0 < learned.deviation.max_difference < 1e-5
    passed = gate.check(pair.step())
    assert passed.verdict == "passed"
    assert passed.is_good and learned.is_good
    assert json.loads(json.dumps(passed.as_dict()))["committed"]["version"] == 2
    assert "version 2 passed" in str(passed)


def test_bit_identical_versions_are_never_flagged(pair: Pair) -> None:
    first = pair.publish()
    gate = Gate(pair.scorer, pair.store)
    gate.check(first)
    assert {gate.check(pair.step()).verdict for _ in range(60)} == {"passed"}


def test_nothing_passes_before_limits_are_learned(pair: Pair) -> None:
    unproven = Committed(1, pair.publish().manifest_sha256, is_proven=False)
    gate = Gate(pair.scorer, pair.store)
    for _ in range(3):
        report = gate.check(unproven)
        assert report.verdict == "unjudged"
        assert not report.is_good
        assert "not proven" in report.reason
    assert gate.limits is None
    assert gate.check(pair.step()).verdict == "learned"


@pytest.mark.parametrize("name", ["embedding", "head"])
def test_one_flipped_high_bit_of_one_weight_is_caught(name: str) -> None:
    pair = Pair()
    first = pair.publish()
    gate = Gate(pair.scorer, pair.store)
    gate.check(first)
    second = pair.step()
    token = PROBES[0].prompt[0]
    place = (token, 3) if name == "embedding" else (3, PROBES[0].continuation[0])
    assert abs(pair.live[name][place]) < 2
    pair.live[name].view(np.uint32)[place] ^= 1 << 30
    pair.scorer.reset_cache()
    assert not abs(pair.live[name][place]) <= 1e30
    report = gate.check(second)
    assert report.verdict == "flagged"
    assert "look at caches and at what is derived" in report.reason
    assert gate.refuses(second.manifest_sha256)
    assert not gate.refuses(first.manifest_sha256)


def test_a_stale_prefix_cache_is_caught_although_the_weights_are_proven(pair: Pair) -> None:
    first = pair.publish()
    gate = Gate(pair.scorer, pair.store)
    gate.check(first)
    pair.resets_cache = False
    report = gate.check(pair.step())
    assert report.verdict == "flagged"
    assert report.reason.startswith("resumed_difference")
    assert report.deviation.max_difference <= gate.limits.max_difference


def test_a_stale_cache_gives_no_limits(pair: Pair) -> None:
    pair.publish()
    pair.scorer.score(PROBES, 0)
    pair.resets_cache = False
    gate = Gate(pair.scorer, pair.store)
    report = gate.check(pair.step())
    assert report.verdict == "flagged"
    assert gate.limits is None


def test_a_stale_shard_is_caught(pair: Pair) -> None:
    first = pair.publish()
    gate = Gate(pair.scorer, pair.store)
    gate.check(first)
    half = pair.live["head"][:8].copy()
    pair.weights["head"] *= np.float32(1.02)
    second = pair.publish()
    pair.live["head"][:8] = half
    report = gate.check(Committed(second.version, second.manifest_sha256, is_proven=False))
    assert report.verdict == "flagged"
    assert "max_difference" in report.reason and "caches" not in report.reason


def test_an_engine_that_stayed_behind_is_caught(pair: Pair) -> None:
    first = pair.publish()
    gate = Gate(pair.scorer, pair.store)
    gate.check(first)
    old = {name: values.copy() for name, values in pair.live.items()}
    second = pair.step()
    for name, values in old.items():
        pair.live[name][:] = values
    assert gate.check(second).verdict == "flagged"


def test_another_model_gives_no_limits(pair: Pair) -> None:
    first = pair.publish()
    other = MemoryScorer(-pair.live["embedding"], pair.live["head"])
    gate = Gate(other, pair.store)
    report = gate.check(first)
    assert report.verdict == "flagged"
    assert "do not compute the same" in report.reason
    assert gate.limits is None
    assert not gate.check(first).is_good


def test_one_in_so_many_is_scored_and_the_others_say_so(pair: Pair) -> None:
    first = pair.publish()
    gate = Gate(pair.scorer, pair.store, every=3)
    verdicts = [gate.check(first).verdict, *(gate.check(pair.step()).verdict for _ in range(6))]
    assert verdicts == ["learned", "skipped", "skipped", "passed", "skipped", "skipped", "passed"]


def test_a_turn_is_not_skipped_while_there_are_no_limits(pair: Pair) -> None:
    gate = Gate(MemoryScorer(np.eye(50), np.eye(50)), pair.store, every=10, wait_s=0)
    unscored = pair.publish(scored=False)
    assert gate.check(unscored).verdict == "unjudged"
    gate._engine = pair.scorer
    assert gate.check(pair.step()).verdict == "learned"


def test_without_scores_of_exactly_this_version_nothing_passes(pair: Pair) -> None:
    gate = Gate(pair.scorer, pair.store, limits=WIDE, wait_s=0.2)
    missing = gate.check(pair.publish(scored=False))
    assert (missing.verdict, missing.reason) == ("unjudged", "the store has no scores")
    second = pair.step()
    other = gate.check(Committed(second.version, "0" * 64, is_proven=True))
    assert other.verdict == "unjudged"
    assert "another version of this number" in other.reason


def test_rollback_puts_the_last_good_version_back(pair: Pair) -> None:
    first = pair.publish()
    gate = Gate(pair.scorer, pair.store, action="rollback")
    served = {name: values.copy() for name, values in pair.live.items()}
    assert gate.check(first, pair.sync).rolled_back_to is None
    second = pair.step()
    pair.live["head"].view(np.uint32)[3, PROBES[0].continuation[0]] ^= 1 << 30

    def repair(version: int) -> None:
        pair.receiver.sync(version, repair=True)
        pair.scorer.reset_cache()

    report = gate.check(second, repair)
    assert (report.verdict, report.rolled_back_to) == ("flagged", 1)
    assert "put back to 1" in str(report)
    for name, values in served.items():
        assert np.array_equal(pair.live[name].view(np.uint32), values.view(np.uint32))
    assert gate.refuses(second.manifest_sha256)
    assert gate.check(pair.step(), repair).verdict == "passed"


def test_rollback_without_a_good_version_says_so(pair: Pair) -> None:
    first = pair.publish()
    gate = Gate(pair.scorer, pair.store, action="rollback", limits=Limits(0.0, 0.0, 0.0))
    report = gate.check(first, pair.sync)
    assert (report.verdict, report.rolled_back_to) == ("flagged", None)
    assert "no good version to put back" in report.reason


def test_a_rollback_that_fails_is_raised_and_the_version_stays_refused(pair: Pair) -> None:
    first = pair.publish()
    gate = Gate(pair.scorer, pair.store, action="rollback")
    gate.check(first, pair.sync)
    second = pair.step()
    pair.live["head"][:] = 0

    def fail(version: int) -> None:
        raise FormatError(f"version {version} is gone")

    with pytest.raises(FormatError, match="version 1 is gone"):
        gate.check(second, fail)
    assert gate.refuses(second.manifest_sha256)


def test_wrong_settings_are_refused(pair: Pair) -> None:
    committed = pair.publish()
    for options in ({"every": 0}, {"action": "explode"}, {"wait_s": -1}, {"wait_s": float("nan")}):
        with pytest.raises(ConfigError):
            Gate(pair.scorer, pair.store, **options)
    with pytest.raises(ConfigError, match="needs roll_back"):
        Gate(pair.scorer, pair.store, action="rollback").check(committed)


class Broken(MemoryScorer):
    """Answers with NaN for one place."""

    def score(self, probes, top):
        scores = super().score(probes, top)
        broken = scores[1].logprobs.copy()
        broken[2] = np.nan
        scores[1] = Scores(broken, scores[1].top_tokens, scores[1].top_logprobs, scores[1].resumed)
        return scores


def test_nan_from_the_engine_is_flagged_never_learned_and_placed(pair: Pair) -> None:
    first = pair.publish()
    broken = Broken(pair.live["embedding"], pair.live["head"])
    fresh = Gate(broken, pair.store)
    assert fresh.check(first).verdict == "flagged"
    assert fresh.limits is None
    report = Gate(broken, pair.store, limits=WIDE).check(first)
    assert report.verdict == "flagged"
    assert "1 of 24 scores are NaN or infinite" in report.reason
    assert (report.deviation.probe, report.deviation.place) == (1, 2)
    json.dumps(report.as_dict(), allow_nan=False)


def test_a_trainer_whose_scores_are_nan_publishes_none(pair: Pair) -> None:
    report = pair.publisher.publish(pair.weights)
    broken = Broken(*(weight.astype(np.float64) for weight in pair.weights.values()))
    with pytest.raises(FormatError, match="its own weights are broken"):
        publish_scores(pair.store, report.version, report.manifest_sha256, broken, PROBES)
    assert pair.store.list("scores/") == []
