"""The trainer's scores as a file: the same to the last bit, and anything else is refused."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate_pair import PROBES, Pair
from syncline import MemoryStore
from syncline.cli import main
from syncline.errors import ConfigError, FormatError, ObjectExistsError, SynclineError
from syncline.format.strict_json import dump
from syncline.gate import make_reference, publish_scores, read_reference
from syncline.gate.reference import dump_reference, load_reference
from syncline.scorers import MemoryScorer
from syncline.stores import FilesystemStore
from syncline.sync import Publisher, Receiver

SHA = "ab" * 32


def reference(top: int = 4):
    rng = np.random.default_rng(1)
    scorer = MemoryScorer(rng.standard_normal((50, 8)), rng.standard_normal((8, 50)))
    return make_reference(7, SHA, scorer, PROBES, top)


def test_it_comes_back_to_the_last_bit() -> None:
    made = reference()
    raw = dump_reference(made)
    read = load_reference(raw, "scores")
    assert (read.version, read.manifest_sha256, read.scorer, read.top) == (7, SHA, "memory", 4)
    assert read.probes == made.probes
    for one, other in zip(read.scores, made.scores, strict=True):
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert one.top_tokens.tobytes() == other.top_tokens.tobytes()
        assert one.top_logprobs.tobytes() == other.top_logprobs.tobytes()
    assert dump_reference(read) == raw


def edit(document: dict, path: tuple, value: object) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), "syncline-manifest", "format"),
        (("format_version",), 2, "newer Syncline"),
        (("extra",), 1, "not a known key"),
        (("version",), 0, "version"),
        (("manifest_sha256",), "xyz", "64 lowercase"),
        (("top",), -1, "top"),
        (("top",), 5, "5 different tokens"),
        (("probes",), [], "at least one probe"),
        (("probes", 0), 3, "must be an object"),
        (("probes", 0, "prompt"), [], "at least one token"),
        (("probes", 0, "continuation"), [1], "one list a place"),
        (("probes", 0, "prompt", 0), -1, "integer"),
        (("probes", 0, "prompt", 0), 1 << 31, "integer"),
        (("probes", 0, "prompt", 0), True, "integer"),
        (("probes", 0, "logprobs", 0), "low", "finite number"),
        (("probes", 0, "logprobs", 0), False, "finite number"),
        (("probes", 0, "logprobs", 0), 10**400, "finite number"),
        (("probes", 0, "logprobs", 0), 0.5, "at most 0"),
        (("probes", 0, "logprobs"), [], "scores of the 8 tokens"),
        (("probes", 0, "top_tokens"), [], "one list a place"),
        (("probes", 0, "top_tokens", 0), [1, 1, 2, 3], "different tokens"),
        (("probes", 0, "top_logprobs", 0), [-1.0], "as long as"),
    ],
)
def test_anything_else_is_refused_and_says_where(path: tuple, value: object, words: str) -> None:
    document = json.loads(dump_reference(reference()))
    edit(document, path, value)
    with pytest.raises(FormatError, match=words):
        load_reference(dump(document), "scores/weight_v000007.json")


def test_nan_in_the_file_is_refused() -> None:
    raw = dump_reference(reference()).replace(b'"logprobs":[-', b'"logprobs":[NaN,-', 1)
    with pytest.raises(FormatError, match="finite"):
        load_reference(raw, "scores")


@given(st.data())
def test_a_damaged_file_is_refused_or_says_something_else(data: st.DataObject) -> None:
    raw = bytearray(RAW)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    try:
        load_reference(bytes(raw), "scores")
    except FormatError:
        return


RAW = dump_reference(reference())


@given(st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(), st.lists))
def test_any_json_in_any_place_is_read_or_refused(value: object) -> None:
    document = json.loads(RAW)
    for path in (("probes", 0, "logprobs"), ("probes", 0, "top_tokens"), ("top",), ("probes",)):
        changed = copy.deepcopy(document)
        edit(changed, path, value)
        try:
            load_reference(json.dumps(changed).encode(), "scores")
        except FormatError:
            continue


def test_scores_are_written_once_and_found_beside_the_version(tmp_path, capsys) -> None:
    store = FilesystemStore(tmp_path)
    weights = {"embedding": np.eye(50), "head": np.eye(50)}
    publisher = Publisher(store)
    scorer = MemoryScorer(weights["embedding"], weights["head"])
    assert read_reference(store, 1, wait_s=0.1) is None
    for _ in range(2):
        report = publisher.publish(weights)
        publish_scores(store, report.version, report.manifest_sha256, scorer, PROBES)
        weights["head"][0] += 1
    with pytest.raises(ObjectExistsError):
        publish_scores(store, 2, report.manifest_sha256, scorer, PROBES)
    assert read_reference(store, 2).manifest_sha256 == report.manifest_sha256
    assert [info.key for info in store.list("scores/")] == [
        "scores/weight_v000001.json",
        "scores/weight_v000002.json",
    ]
    main(["fsck", str(tmp_path), "--deep"])
    assert capsys.readouterr().out == "2 versions checked, 0 faults\n"


def test_who_does_not_know_of_scores_is_not_disturbed(tmp_path) -> None:
    pair = Pair()
    pair.publish()
    pair.step()
    again = Publisher(pair.store)
    assert again.publish(pair.weights).version == 3
    assert Receiver(pair.store, pair.receiver._engine).sync().version == 3


def test_probes_are_needed() -> None:
    scorer = MemoryScorer(np.eye(4), np.eye(4))
    with pytest.raises(ConfigError, match="at least one probe"):
        publish_scores(MemoryStore(), 1, SHA, scorer, ())
    with pytest.raises(SynclineError):
        publish_scores(MemoryStore(), 1, SHA, scorer, PROBES)
