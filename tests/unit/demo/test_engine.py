from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from syncline.demo.arithmetic import Problem
from syncline.demo.engine import TransformersEngine, serve, until
from syncline.demo.identity import differences, sha256_by_name
from syncline.demo.models import load_tokenizer
from syncline.demo.rollout import RolloutEngine, RolloutRequest, Synced
from syncline.demo.trainer import Trainer
from syncline.errors import VerifyError
from syncline.stores import open_store
from syncline.sync import Publisher

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


class Recorder(RolloutEngine):
    """Answers with what it was asked; its digests fail."""

    def __init__(self) -> None:
        self.asked: list[RolloutRequest] = []

    def sync(self) -> Synced:
        return Synced(3, {"fetch": 0.5})

    def rollout(self, request: RolloutRequest) -> list[list[list[int]]]:
        self.asked.append(request)
        return [[[1, 2]]]

    def digests(self) -> dict[str, str]:
        raise VerifyError("tensor w differs")

    def close(self) -> None:
        pass


def answers(*requests: dict) -> tuple[Recorder, list[dict]]:
    engine, replies = Recorder(), io.StringIO()
    serve(engine, io.StringIO("".join(json.dumps(one) + "\n" for one in requests)), replies)
    return engine, [json.loads(line) for line in replies.getvalue().splitlines()]


def test_serve_answers_each_act_and_goes_on_after_an_error() -> None:
    arguments = {"prompts": [[1]], "samples": 2, "max_new_tokens": 3, "stop": "\n", "seed": 4}
    engine, replies = answers(
        {"act": "digests", "arguments": {}},
        {"act": "sync", "arguments": {}},
        {"act": "rollout", "arguments": arguments},
        {"act": "dance", "arguments": {}},
    )
    assert engine.asked == [RolloutRequest(**arguments)]
    assert replies[0] == {"error": "VerifyError: tensor w differs"}
    assert replies[1] == {"result": {"version": 3, "seconds": {"fetch": 0.5}}}
    assert replies[2] == {"result": [[[1, 2]]]}
    assert "found 'dance'" in replies[3]["error"]


def test_a_defect_ends_the_service() -> None:
    with pytest.raises(KeyError):
        answers({"act": "sync"})


def test_a_completion_ends_with_the_first_token_that_ends_it() -> None:
    assert until([5, 6, 2, 7, 2], {2, 9}) == [5, 6, 2]
    assert until([5, 6], {2}) == [5, 6]


@pytest.fixture
def request_of_two(tiny_checkpoint: Path) -> RolloutRequest:
    tokenizer = load_tokenizer(tiny_checkpoint)
    prompts = [tokenizer.encode(text) for text in (Problem(3, 4).prompt, "9+9=")]
    return RolloutRequest(prompts, samples=3, max_new_tokens=5, stop="\n", seed=1)


def test_rollouts_are_repeatable_and_follow_the_store(
    tiny_checkpoint: Path, request_of_two: RolloutRequest, tmp_path: Path
) -> None:
    publisher = Publisher(open_store(tmp_path / "store"), base=tiny_checkpoint)
    engine = TransformersEngine(tiny_checkpoint, str(tmp_path / "store"))
    assert engine.sync().version == 1

    first = engine.rollout(request_of_two)
    assert [len(group) for group in first] == [3, 3]
    assert all(1 <= len(one) <= 5 for group in first for one in group)
    assert engine.rollout(request_of_two) == first

    trainer = Trainer(tiny_checkpoint, learning_rate=1e-2, pad=0, dtype=torch.float32)
    weights = {name: tensor.neg() for name, tensor in trainer.weights()}
    publisher.publish(weights)
    assert engine.sync().version == 2
    assert differences(sha256_by_name(weights.items()), engine.digests()) == {}
    assert engine.rollout(request_of_two) != first


def test_every_token_with_the_stop_text_ends_a_completion(
    tiny_checkpoint: Path, request_of_two: RolloutRequest, tmp_path: Path
) -> None:
    engine = TransformersEngine(tiny_checkpoint, str(tmp_path / "store"))
    tokenizer = load_tokenizer(tiny_checkpoint)
    for group in engine.rollout(request_of_two):
        for completion in group:
            assert "\n" not in tokenizer.decode(completion[:-1])
