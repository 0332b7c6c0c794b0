"""A trainer, a store, and a real SGLang server that follows it."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import sglang_probe
import sglang_tiny as tiny
import syncline
from sglang_real import SglangServer as RealServer
from syncline.engines import CheckpointDir
from syncline.sglang.change import LOADER, NOTHING
from syncline.sglang.commit import CommitOptions
from syncline.sglang.control import SglangHttp
from syncline.sglang.server import SglangServer

TESTS = Path(sglang_probe.__file__).parent
PROMPT = [int(token) for token in np.random.default_rng(5).integers(3, 250, 200)]


class Pair:
    """A trainer and a real server, started from version 1, with its follower.

    Args:
        model: configuration of the model.
        tp: ranks; `arguments`: more of the server's.
        plugins: directory in which SGLang looks for plugins.
    """

    def __init__(
        self,
        root: Path,
        model: dict[str, Any],
        tp: int = 1,
        *,
        arguments: Sequence[str] = (),
        plugins: Path | None = None,
    ) -> None:
        self.root, self.tp, self.plugins = root, tp, plugins
        self.arguments = arguments
        base = tiny.write(root / "base", model, seed=1)
        self.weights = load_file(base / "model.safetensors")
        self.store = syncline.open_store(str(root / "run"))
        self.publisher = syncline.Publisher(self.store)
        self.publisher.publish(self.weights)
        self.checkpoint = CheckpointDir(root / "model")
        syncline.Receiver(self.store, self.checkpoint).sync()
        shutil.copy(base / "config.json", root / "model")
        self.rng = np.random.default_rng(11)
        self._made: list[SglangServer] = []
        self.start()

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    def start(self) -> None:
        path = [TESTS, *([] if self.plugins is None else [self.plugins])]
        self.real = RealServer(
            self.root / "model",
            self.root / "server.log",
            tp=self.tp,
            arguments=[
                *("--custom-weight-loader", LOADER, *sglang_probe.LOADERS),
                *self.arguments,
            ],
            path=path,
            environment={"SYNCLINE_SGLANG_STAGING": str(self.staging)},
        ).wait()
        self.control = SglangHttp(self.real.url)
        self.another()

    def close(self) -> None:
        for made in self._made:
            made.close()
        self.real.close()

    def another(self, **given: Any) -> SglangServer:
        """Return a follower as after a restart: with nothing but what is on disk, and none before it alive."""
        for made in self._made:
            made.close()
        self.follower = SglangServer(
            self.control,
            self.store,
            CheckpointDir(self.root / "model"),
            self.staging,
            **{"options": CommitOptions(step_timeout_s=120.0), **given},
        )
        self._made.append(self.follower)
        return self.follower

    def train(self, *, share: float = 0.02, names: Sequence[str] | None = None) -> int:
        """Change some elements of every tensor, or of those named, and publish; return the version."""
        for tensor in [self.weights[name] for name in (self.weights if names is None else names)]:
            width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
            flat = tensor.view(width).view(-1).numpy()
            count = max(1, int(share * flat.size * self.rng.random()))
            at = self.rng.choice(flat.size, count, replace=False)
            flat[at] ^= self.rng.integers(1, 1 << 5, count).astype(flat.dtype)
        return int(self.publisher.publish(self.weights).version)

    def follow(self, count: int) -> None:
        """Bring the server to so many versions, in place, and check each."""
        self.follower.sync()
        for _ in range(count):
            version = self.train()
            done = self.follower.sync()
            assert done is not None and done.route == "in place"
            assert done.label == self.control.label(60) == str(version)
            self.check()

    def generate(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return list(self.stream(prompt, tokens))[-1]

    def stream(self, prompt: list[int], tokens: int) -> Iterator[dict[str, Any]]:
        body = {
            "input_ids": prompt,
            "stream": True,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        }
        request = urllib.request.Request(
            self.real.url + "/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def probe(self, loader: str) -> list[dict[str, str]]:
        """Return what a loader of `sglang_probe` notes on every rank."""
        self.control.begin(60)
        self.control.load_tensors([NOTHING] * self.tp, loader, 60)
        self.control.end(60)
        return sglang_probe.read(self.staging, self.tp)

    def check(self) -> None:
        """Compare with a model that SGLang loads anew, and with its own load of the whole checkpoint into this one.

        The checkpoint has the trainer's bits.
        """
        held = self.checkpoint.tensors()
        assert held.keys() == self.weights.keys()
        for name, tensor in self.weights.items():
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            assert self.checkpoint.view(name).tobytes() == raw.tobytes()
        found = self.control.checksums(120)
        assert len(found.ranks) == self.tp
        assert self.probe(sglang_probe.FRESH) == list(found.ranks)
        self.control.load_directory(str(self.root / "model"), 120)
        assert self.control.checksums(120) == found
