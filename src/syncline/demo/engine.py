"""The rollout engine: a process that serves a model and follows a Syncline store.

Started by the trainer as `python -m syncline.demo.engine CHECKPOINT STORE`. It loads the base
checkpoint, takes every newer version from the store through `syncline.Receiver`, and generates with
transformers. Requests come in on standard input and replies go out on standard output, one JSON
object a line; the process ends when its standard input does, so it never outlives the trainer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from syncline.demo.identity import live_tensors, sha256_by_name
from syncline.demo.models import StopTokens, load_model, load_tokenizer, transformers
from syncline.demo.rollout import RolloutEngine, RolloutRequest, Synced
from syncline.engines import TorchModule
from syncline.errors import SynclineError
from syncline.stores import open_store
from syncline.sync import Receiver


class TransformersEngine(RolloutEngine):
    """Generates with transformers on this machine's CPU, in the process that calls it.

    Args:
        base: checkpoint directory to load; the store's first version.
        store: URL or path of the store to follow.
    """

    def __init__(self, base: Path, store: str) -> None:
        import torch

        self.model = load_model(base, torch.bfloat16)
        self._tokenizer = load_tokenizer(base)
        self._receiver = Receiver(open_store(store), TorchModule(self.model))
        self._stops = StopTokens(self._tokenizer)

    def sync(self) -> Synced:
        """See `RolloutEngine.sync`."""
        applied = self._receiver.sync()
        return Synced(applied.version, dict(applied.seconds))

    def rollout(self, request: RolloutRequest) -> list[list[list[int]]]:
        """See `RolloutEngine.rollout`."""
        import torch

        pad = self._tokenizer.pad_token_id
        ends = self._stops(request.stop)
        rows = [row for row in request.prompts for _ in range(request.samples)]
        width = max(map(len, rows))
        ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        sampling = transformers().GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=ends,
            pad_token_id=pad,
        )
        torch.manual_seed(request.seed)
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, generation_config=sampling)
        completions = [until(row, set(ends)) for row in out[:, width:].tolist()]
        return [
            completions[at : at + request.samples]
            for at in range(0, len(completions), request.samples)
        ]

    def digests(self) -> dict[str, str]:
        """See `RolloutEngine.digests`."""
        return sha256_by_name(live_tensors(self.model).items())

    def close(self) -> None:
        """Do nothing: the process's end frees everything."""


def until(tokens: Sequence[int], ends: set[int]) -> list[int]:
    """Return the tokens up to the first one that ends a completion, that one included."""
    for place, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: place + 1])
    return list(tokens)


def serve(engine: RolloutEngine, requests: TextIO, replies: TextIO) -> None:
    """Answer requests until there are no more; an error of Syncline's is an answer too.

    Any other exception ends the process, with its traceback on standard error.
    """
    for line in requests:
        request = json.loads(line)
        try:
            result = _answer(engine, request["act"], request["arguments"])
        except SynclineError as error:
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})
        else:
            _reply(replies, {"result": result})


def _answer(engine: RolloutEngine, act: str, arguments: Mapping[str, Any]) -> Any:
    match act:
        case "sync":
            synced = engine.sync()
            return {"version": synced.version, "seconds": dict(synced.seconds)}
        case "rollout":
            return engine.rollout(RolloutRequest(**arguments))
        case "digests":
            return engine.digests()
        case _:
            raise SynclineError(
                f"expected the act sync, rollout or digests, found {act!r} in a request"
            )


def _reply(replies: TextIO, message: Mapping[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def main(arguments: Sequence[str]) -> None:
    """Serve the checkpoint and the store that the two arguments name."""
    # Ctrl-C reaches the whole terminal group: the trainer decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever a library prints must not land between the replies.
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        base, store = arguments
        engine = TransformersEngine(Path(base), store)
        serve(engine, sys.stdin, replies)


if __name__ == "__main__":
    main(sys.argv[1:])
