"""The trainer's scores of one version, as they travel: a JSON object in the store, beside the version.

It lies under `scores/`, outside the version's directory: readers of the version, those of other projects
too, take every file of that directory and never look elsewhere. It names the version by the digest of its
manifest, so scores of a version that was replaced are never taken for those of the new one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from syncline.abc import Scorer, Store
from syncline.errors import ConfigError, FormatError, ObjectNotFoundError
from syncline.format import names
from syncline.format.strict_json import Fields, document, dump, integer, items, number
from syncline.gate.deviation import deviation
from syncline.scorers.answers import as_scores
from syncline.types import Probe, Scores

TOP = 20
"""Most probable tokens that are kept at each place; also what vLLM gives at most unless told otherwise."""

LIMIT_BYTES = 1 << 26

_FORMAT = "syncline-scores"
_KEYS = ("format", "format_version", "version", "manifest_sha256", "scorer", "top", "probes")
_PROBE_KEYS = ("prompt", "continuation", "logprobs", "top_tokens", "top_logprobs")
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, eq=False)
class Reference:
    """What the trainer says of the probes at one version.

    Attributes:
        version, manifest_sha256: which version.
        scorer: what scored, in words.
        top: how many of the most probable tokens each place has.
        probes, scores: one by one.
    """

    version: int
    manifest_sha256: str
    scorer: str
    top: int
    probes: tuple[Probe, ...]
    scores: tuple[Scores, ...]


def make_reference(
    version: int, manifest_sha256: str, scorer: Scorer, probes: Sequence[Probe], top: int = TOP
) -> Reference:
    """Score the probes by the trainer's weights, which are those of the version.

    Raises:
        FormatError: the scores are not finite: the trainer's weights are broken.
        ConfigError: there are no probes, or the model cannot take them.
    """
    if not probes:
        raise ConfigError("expected at least one probe to score, found none")
    scores = scorer.score(probes, top)
    deviation(probes, scores, scores)
    return Reference(version, manifest_sha256, scorer.name, top, tuple(probes), tuple(scores))


def publish_scores(
    store: Store,
    version: int,
    manifest_sha256: str,
    scorer: Scorer,
    probes: Sequence[Probe],
    *,
    top: int = TOP,
) -> Reference:
    """Score the version that was just published, and put the scores into its store for every engine.

    Args:
        version, manifest_sha256: of the `PublishReport`.
        scorer: holds these weights still; nothing checks that.

    Raises:
        ObjectExistsError: the version has scores already; they stay.
        Those of `make_reference`; the version stays published, without scores.

    Example:
        >>> import numpy as np, syncline
        >>> from syncline.gate import draw_probes
        >>> from syncline.scorers import MemoryScorer
        >>> weights = {"embedding": np.eye(8), "head": np.eye(8)}
        >>> store = syncline.MemoryStore()
        >>> report = syncline.Publisher(store).publish(weights)
        >>> scorer = MemoryScorer(weights["embedding"], weights["head"])
        >>> probes = draw_probes(8)
        >>> reference = publish_scores(
        ...     store, report.version, report.manifest_sha256, scorer, probes, top=5
        ... )
        >>> read_reference(store, report.version).scorer
        'memory'
    """
    reference = make_reference(version, manifest_sha256, scorer, probes, top)
    store.put(names.scores_key(version), [dump_reference(reference)])
    return reference


def read_reference(store: Store, version: int, *, wait_s: float = 0.0) -> Reference | None:
    """Return the trainer's scores of a version; None if there are none after `wait_s` seconds.

    Raises:
        FormatError: what lies there is something else.
    """
    key = names.scores_key(version)
    until_s = time.monotonic() + wait_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return load_reference(store.get(key, 0, LIMIT_BYTES + 1), key)
        except ObjectNotFoundError:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def dump_reference(reference: Reference) -> bytes:
    """Return the reference as JSON; `load_reference` gives the same, to the last bit of every number."""
    return dump(
        {
            "format": _FORMAT,
            "format_version": 1,
            "version": reference.version,
            "manifest_sha256": reference.manifest_sha256,
            "scorer": reference.scorer,
            "top": reference.top,
            "probes": [
                _probe_members(probe, scores)
                for probe, scores in zip(reference.probes, reference.scores, strict=True)
            ],
        }
    )


def load_reference(data: bytes, where: str) -> Reference:
    """Read what `dump_reference` wrote.

    Raises:
        FormatError: anything else; says where.
    """
    fields = document(data, where, _FORMAT, _KEYS, limit_bytes=LIMIT_BYTES)
    top = fields.integer("top", maximum=1 << 20)
    read = [
        _read_probe(value, f"probes[{place}]", where, top)
        for place, value in enumerate(fields.items("probes"))
    ]
    if not read:
        fields.refuse("probes", "a list of at least one probe")
    reference = Reference(
        version=fields.integer("version", minimum=1),
        manifest_sha256=fields.hexadecimal("manifest_sha256", 64),
        scorer=fields.text("scorer"),
        top=top,
        probes=tuple(probe for probe, _ in read),
        scores=tuple(scores for _, scores in read),
    )
    deviation(reference.probes, reference.scores, reference.scores)
    return reference


def _probe_members(probe: Probe, scores: Scores) -> dict[str, Any]:
    return {
        "prompt": list(probe.prompt),
        "continuation": list(probe.continuation),
        "logprobs": scores.logprobs.tolist(),
        "top_tokens": scores.top_tokens.tolist(),
        "top_logprobs": scores.top_logprobs.tolist(),
    }


def _read_probe(value: object, path: str, where: str, top: int) -> tuple[Probe, Scores]:
    fields = Fields(value, where, _PROBE_KEYS, path)
    prompt, continuation = (_tokens(fields, key) for key in ("prompt", "continuation"))
    if not prompt or not continuation:
        fields.refuse("prompt" if not prompt else "continuation", "a list of at least one token")
    probe = Probe(prompt, continuation)
    logprobs = _numbers(fields.items("logprobs"), fields.place("logprobs"))
    tokens, values = fields.items("top_tokens"), fields.items("top_logprobs")
    if not len(tokens) == len(values) == len(continuation):
        fields.refuse("top_tokens", "one list a place, as top_logprobs")
    ranked = [_ranked(*row, fields) for row in zip(tokens, values, strict=True)]
    return probe, as_scores(probe, logprobs, ranked, top, f"{where}: {path}")


def _tokens(fields: Fields, key: str) -> tuple[int, ...]:
    return _token_ids(fields.items(key), fields.place(key))


def _token_ids(values: list[object], where: str) -> tuple[int, ...]:
    return tuple(integer(value, where, maximum=(1 << 31) - 1) for value in values)


def _numbers(values: list[object], where: str) -> list[float]:
    return [number(value, where) for value in values]


def _ranked(tokens: object, values: object, fields: Fields) -> list[tuple[int, float]]:
    ids = _token_ids(items(tokens, fields.place("top_tokens")), fields.place("top_tokens"))
    numbers = _numbers(items(values, fields.place("top_logprobs")), fields.place("top_logprobs"))
    if len(ids) != len(numbers):
        raise FormatError(
            f"{fields.place('top_tokens')} must be as long as top_logprobs, found {len(ids)} and {len(numbers)}"
        )
    return list(zip(ids, numbers, strict=True))
