"""Answers of servers that are not scores of what was asked: refused; what a model computed wrong: kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoring_servers import FakeSglang, FakeVllm, serving
from syncline.abc import Scorer
from syncline.errors import ConfigError, EndpointError, FormatError, PeerLostError, SynclineError
from syncline.hotload import Token
from syncline.scorers import MemoryScorer, SglangScorer, VllmScorer
from syncline.types import Probe

PROBE = Probe((1, 2, 3), (4, 5))
KINDS: dict[str, tuple[Any, type[Scorer]]] = {
    "vllm": (FakeVllm, VllmScorer),
    "sglang": (FakeSglang, SglangScorer),
}


def model() -> MemoryScorer:
    rng = np.random.default_rng(0)
    return MemoryScorer(rng.standard_normal((9, 4)), rng.standard_normal((4, 9)))


def scored(kind: str, top: int = 2, **options: Any) -> Any:
    fake, scorer = KINDS[kind]
    with serving(fake(model()), **options) as url:
        return scorer(url, timeout_s=5.0).score([PROBE], top)[0]


def places(answer: dict) -> list:
    """Return the list of places of vLLM's first answer; other answers are left alone."""
    return answer["choices"][0].get("prompt_logprobs", [{"4": {}} for _ in range(9)])


def inputs(answer: dict, name: str = "input_token_logprobs") -> list:
    return answer["meta_info"].get(name, [[[0, 0, 0], [0, 0, 0]] for _ in range(9)])


VLLM: dict[str, Callable[[dict], object]] = {
    "no choices": lambda a: a["choices"].clear(),
    "truncated": lambda a: places(a).pop(),
    "one too many": lambda a: places(a).insert(1, {"1": {"logprob": -1.0}}),
    "another tokenisation": lambda a: places(a).__setitem__(3, {"8": {"logprob": -1.0}}),
    "no place": lambda a: places(a).__setitem__(3, None),
    "text for a token": lambda a: places(a).__setitem__(3, {"x": {"logprob": -1.0}}),
    "a list for an object": lambda a: places(a).__setitem__(3, []),
    "too few of the best": lambda a: places(a).__setitem__(3, {"4": {"logprob": -1.0}}),
    "the same token twice": lambda a: places(a).__setitem__(
        3, {"4": {"logprob": -1.0}, "04": {"logprob": -1.0}}
    ),
    "text for a number": lambda a: places(a)[3].__setitem__("4", {"logprob": "-1"}),
    "truth for a number": lambda a: places(a)[3].__setitem__("4", {"logprob": True}),
    "no number": lambda a: places(a)[3].__setitem__("4", {}),
    "a probability above 1": lambda a: places(a)[3].__setitem__("4", {"logprob": 0.5}),
}
SGLANG: dict[str, Callable[[dict], object]] = {
    "no meta": lambda a: a.pop("meta_info"),
    "truncated": lambda a: inputs(a).pop(),
    "another tokenisation": lambda a: inputs(a)[3].__setitem__(1, 8),
    "no triple": lambda a: inputs(a).__setitem__(3, [-1.0, 4]),
    "text for a number": lambda a: inputs(a)[3].__setitem__(0, "-1"),
    "too few rankings": lambda a: inputs(a, "input_top_logprobs").pop(),
    "no ranking": lambda a: inputs(a, "input_top_logprobs").__setitem__(3, None),
    "too few of the best": lambda a: inputs(a, "input_top_logprobs")[3].pop(),
    "the same token twice": lambda a: inputs(a, "input_top_logprobs")[3].__setitem__(
        0, [-1.0, *inputs(a, "input_top_logprobs")[3][1][1:]]
    ),
    "a probability above 1": lambda a: inputs(a)[3].__setitem__(0, 0.5),
    "no resumed token": lambda a: a["meta_info"].get("output_token_ids_logprobs", [0]).pop(),
    "no resumed tokens": lambda a: a["meta_info"].pop("output_token_ids_logprobs", None),
}


@pytest.mark.parametrize("name", VLLM)
def test_a_vllm_answer_of_something_else_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match=r"expected .*, found .*; it was not taken for a score"):
        scored("vllm", spoil=VLLM[name])


@pytest.mark.parametrize("name", SGLANG)
def test_an_sglang_answer_of_something_else_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match=r"expected .*, found .*; it was not taken for a score"):
        scored("sglang", spoil=SGLANG[name])


def test_a_resumed_token_that_was_not_asked_for_is_refused() -> None:
    def other(answer: dict) -> None:
        found = answer["choices"][0].get("logprobs")
        if found is not None:
            found["tokens"] = ["token_id:8"]

    with pytest.raises(FormatError, match="expected token 5, found {8: -"):
        scored("vllm", spoil=other)


def test_a_resumed_token_that_nan_logits_led_to_is_nan() -> None:
    def other(answer: dict) -> None:
        found = answer["choices"][0].get("logprobs")
        if found is not None:
            found.update(tokens=["token_id:0"], token_logprobs=[math.nan])

    assert math.isnan(scored("vllm", spoil=other).resumed)


def test_what_vllm_refuses_to_tell_because_it_is_nan_is_nan() -> None:
    """It answered 400, which was taken for an error of the request, and no such version was ever flagged."""

    def refused(answer: dict) -> None:
        raise ConfigError("Out of range float values are not JSON compliant")

    found = scored("vllm", spoil=refused)
    assert np.isnan(found.logprobs).tolist() == [True, True]
    assert np.isnan(found.top_logprobs).all()
    assert found.top_tokens.shape == found.top_logprobs.shape == (2, 2)
    assert math.isnan(found.resumed)


@pytest.mark.parametrize("written", [None, math.nan, -9999.0, -math.inf])
def test_what_the_model_computed_wrong_is_kept(written: float | None) -> None:
    expected = -math.inf if written in {-9999.0, -math.inf} else math.nan
    vllm = scored(
        "vllm", spoil=lambda a: places(a)[3] and places(a)[3]["4"].update(logprob=written)
    )
    sglang = scored("sglang", spoil=lambda a: inputs(a)[3].__setitem__(0, written))
    for one in (vllm, sglang):
        assert np.array_equal(one.logprobs[:1], [expected], equal_nan=True)
        assert math.isfinite(one.logprobs[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raw", [b"", b"[", b"\xff", b"[]", b"7", b'{"a":1,"a":2}', b"[" * 100_000])
def test_what_is_no_answer_is_refused(kind: str, raw: bytes) -> None:
    with pytest.raises(FormatError):
        scored(kind, raw=raw)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(
    answer=st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "prompt_logprobs", "meta_info", "logprobs", "1", "4"]),
                inner,
                max_size=3,
            )
        ),
    )
)
def test_any_json_is_a_score_or_refused(kind: str, answer: Any) -> None:
    def become(sent: dict) -> None:
        sent.clear()
        sent.update(
            answer if isinstance(answer, dict) else {"choices": answer, "meta_info": answer}
        )

    with pytest.raises(SynclineError):
        scored(kind, spoil=become)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_and_a_silent_host_are_errors_of_the_transport(kind: str) -> None:
    fake, scorer = KINDS[kind]
    with serving(fake(model())) as url:
        with pytest.raises(EndpointError, match="vocabulary of 9"):
            scorer(url, timeout_s=5.0).score([Probe((1,), (9,))], 0)
        gone = url
    with pytest.raises(PeerLostError):
        scorer(gone, timeout_s=0.3).score([PROBE], 0)


def test_a_token_goes_along_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = VllmScorer("http://127.0.0.1:1", timeout_s=0.1, token=Token("hidden-away"))
    assert "hidden-away" not in scorer.name
    with pytest.raises(PeerLostError) as lost:
        scorer.score([PROBE], 0)
    assert "hidden-away" not in str(lost.value)
