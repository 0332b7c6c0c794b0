"""Servers that score as vLLM 0.32 and SGLang 0.5.23 write it, around the in-memory model.

The shapes were taken from the real servers' answers (vLLM) and source (SGLang: `tokenizer_manager.py`,
`detokenize_logprob_tokens` and `add_logprob_to_meta_info`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from syncline.errors import ConfigError
from syncline.scorers import MemoryScorer
from syncline.types import Probe

Answer = dict[str, Any]


class FakeVllm:
    """Answers `/v1/completions` with what a memory scorer computes."""

    route = "/v1/completions"

    def __init__(self, scorer: MemoryScorer) -> None:
        self._scorer = scorer

    def answer(self, asked: dict[str, Any]) -> Answer:
        tokens = asked["prompt"]
        assert (asked["max_tokens"], asked["temperature"]) == (1, 0.0)
        if "prompt_logprobs" in asked:
            places = [None, *self._places(tokens, asked["prompt_logprobs"])]
            return {"choices": [{"index": 0, "text": "", "prompt_logprobs": places}]}
        [last] = asked["allowed_token_ids"]
        assert asked["logprobs"] == 0
        assert asked["return_tokens_as_token_ids"] is True
        [one] = self._scorer.score([Probe(tuple(tokens), (last,))], 0)
        name = f"token_id:{last}"
        found = {
            "text_offset": [0],
            "tokens": [name],
            "token_logprobs": [one.resumed],
            "top_logprobs": [{name: one.resumed}],
        }
        return {"choices": [{"index": 0, "text": "?", "logprobs": found}]}

    def _places(self, tokens: list[int], top: int) -> list[Answer]:
        [one] = self._scorer.score([Probe((tokens[0],), tuple(tokens[1:]))], top)
        places = []
        for place, token in enumerate(tokens[1:]):
            # The token itself stands first, also where it is among the most probable.
            row = {token: float(one.logprobs[place])}
            row |= dict(zip(one.top_tokens[place].tolist(), one.top_logprobs[place], strict=True))
            places.append(
                {
                    str(each): {"logprob": float(value), "rank": 1, "decoded_token": "?"}
                    for each, value in row.items()
                }
            )
        return places


class FakeSglang:
    """Answers `/generate` with what a memory scorer computes."""

    route = "/generate"

    def __init__(self, scorer: MemoryScorer) -> None:
        self._scorer = scorer

    def answer(self, asked: dict[str, Any]) -> Answer:
        tokens, top = asked["input_ids"], asked.get("top_logprobs_num", 0)
        assert asked["return_logprob"] is True
        assert asked["sampling_params"]["max_new_tokens"] == 1
        meta: Answer = {"id": "0", "finish_reason": {"type": "length", "length": 1}}
        if asked["logprob_start_len"] == 0:
            [one] = self._scorer.score([Probe((tokens[0],), tuple(tokens[1:]))], top)
            meta["input_token_logprobs"] = [
                [None, tokens[0], None],
                *([v, t, None] for v, t in zip(one.logprobs.tolist(), tokens[1:], strict=True)),
            ]
            meta["input_top_logprobs"] = [None] + [
                [[v, t, None] for v, t in zip(values.tolist(), ids.tolist(), strict=True)]
                for values, ids in zip(one.top_logprobs, one.top_tokens, strict=True)
            ]
        else:
            [last] = asked["token_ids_logprob"]
            [one] = self._scorer.score([Probe(tuple(tokens), (last,))], 0)
            meta["output_token_ids_logprobs"] = [[[one.resumed, last, None]]]
        return {"text": "?", "output_ids": [0], "meta_info": meta}


@contextmanager
def serving(
    fake: FakeVllm | FakeSglang,
    spoil: Callable[[Answer], object] = lambda answer: None,
    raw: bytes | None = None,
    workers: list[Answer] | None = None,
) -> Iterator[str]:
    """Run a fake server and yield its URL.

    Args:
        spoil: changes an answer before it is sent.
        raw: sent in place of every answer.
        workers: what Syncline's workers in a vLLM answer; None: it has none.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = 200
            try:
                if self.path == "/collective_rpc" and workers is not None:
                    return self.send(200, json.dumps({"results": workers}).encode())
                if self.path != fake.route:
                    return self.send(404, b'{"detail": "Not Found"}')
                with np.errstate(all="ignore"):
                    answer = fake.answer(asked)
                spoil(answer)
            except ConfigError as error:
                status, answer = 400, {"error": {"message": str(error), "code": 400}}
            return self.send(status, json.dumps(answer).encode() if raw is None else raw)

        def send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
