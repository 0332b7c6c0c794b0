"""Identities, weight versions and tokens: what is read, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError, FormatError
from syncline.format.names import MAX_INTEGER, version_dir
from syncline.hotload import Token, WeightVersion, identity

VERSIONS = st.integers(1, MAX_INTEGER)


@given(VERSIONS)
def test_identities_read_back(version: int) -> None:
    for spelling in ("directory", "number"):
        text = identity.spell(version, spelling)
        assert identity.parse(text, "identity") == (version, spelling)
        assert identity.check(text, "identity") == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "07",
        "-1",
        "+1",
        "1_0",
        " 1",
        "1.0",
        "٣",
        "²",
        "weight_v7",
        "weight_v000000",
        "weight_v0000007",
        "../weight_v000007",
        "weight_v000007/",
        "weight_v000007\n",
        str(MAX_INTEGER + 1),
        "9" * 5000,
    ],
)
def test_identities_that_name_no_version(text: str) -> None:
    with pytest.raises(FormatError, match=r"^here must be a version's number"):
        identity.parse(text, "here")


@given(st.text())
def test_any_text_is_an_identity_or_refused(text: str) -> None:
    try:
        assert identity.check(text, "identity") == text
    except ConfigError:
        return
    assert "/" not in text
    assert not text.startswith(".")


LIMITS = st.none() | st.integers(0, 20)


@given(LIMITS, LIMITS, st.none() | st.integers(0, 20))
def test_a_weight_version_is_what_it_says(
    exact: int | None, minimum: int | None, served: int | None
) -> None:
    wanted = WeightVersion.parse({"exact_version": exact, "min_required_version": minimum})
    assert wanted == WeightVersion(exact, minimum)
    is_fine = (exact is None or served == exact) and (
        minimum is None or (served is not None and served >= minimum)
    )
    refusal = wanted.refusal(served)
    assert (refusal is None) == is_fine
    if refusal is not None:
        is_too_old = served is not None and refusal.wanted < served
        assert (refusal.kind == "WeightVersionTooOld") == is_too_old
        body = refusal.as_dict()["error"]
        assert (body["target_version"], body["current_version"]) == (refusal.wanted, served)
    if served is not None:
        assert wanted.accepts(served) == is_fine


def test_the_two_names_of_the_minimum() -> None:
    assert WeightVersion.parse({"min_version": 3}) == WeightVersion(minimum=3)
    assert WeightVersion.parse({"min_version": 3, "min_required_version": "3"}).minimum == 3
    with pytest.raises(FormatError, match="contradict"):
        WeightVersion.parse({"min_version": 3, "min_required_version": 4})


@pytest.mark.parametrize(
    "value",
    [
        7,
        "7",
        [],
        None,
        {"exact": 7},
        {"exact_version": True},
        {"exact_version": 1.0},
        {"exact_version": -1},
        {"exact_version": "newest"},
        {"exact_version": {}},
        {"min_version": MAX_INTEGER + 1},
    ],
)
def test_weight_versions_that_are_none(value: Any) -> None:
    with pytest.raises(FormatError, match="weight_version"):
        WeightVersion.parse(value)


def test_weight_versions_may_be_directory_names() -> None:
    assert WeightVersion.parse({"exact_version": version_dir(7)}) == WeightVersion(exact=7)


@pytest.mark.parametrize(
    ("header", "is_in"),
    [
        ("Bearer abc", True),
        ("bearer abc", True),
        ("Bearer  abc", True),
        ("Bearer abcd", False),
        ("Bearer ab", False),
        ("Bearer", False),
        ("Basic abc", False),
        ("abc", False),
        ("", False),
        ("Bearer ü", False),
    ],
)
def test_tokens_are_compared_whole(header: str, is_in: bool) -> None:
    assert Token("abc").is_in(header) == is_in


def test_a_token_is_not_shown() -> None:
    token = Token("s3cret")
    assert "s3cret" not in f"{token} {token!r} {[copy.copy(token)]}"
    assert token.header() == "Bearer s3cret"


def test_a_token_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    assert Token.from_env("SOME_TOKEN").is_in("Bearer s3cret")
    for bad in ("", "s3 cret", "s3cret\n"):
        monkeypatch.setenv("SOME_TOKEN", bad)
        with pytest.raises(ConfigError, match=r"^SOME_TOKEN: ") as caught:
            Token.from_env("SOME_TOKEN")
        assert "s3" not in str(caught.value)
