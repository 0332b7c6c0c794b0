"""A real vLLM server for tests: started, asked, told to fail, and stopped; and the model that it must equal."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlencode

import syncline
from syncline.gate import publish_scores
from syncline.hotload.client import PATH
from syncline.scorers import TorchScorer
from syncline.types import Probe
from vllm_plugin import plugin_path

ROOT = Path(__file__).resolve().parents[1]
START_S = 240


def environment(directory: Path, python: Path = Path(sys.executable)) -> dict[str, str]:
    """Return the environment in which a vLLM on two cores runs with the worker that can be broken."""
    paths = [*plugin_path(directory / "plugin"), str(ROOT / "src"), str(ROOT / "tests")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Served:
    """One `vllm serve`, with its log; may be stopped, killed and started again."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        *,
        workers: int = 1,
        dtype: str = "float32",
        more: tuple[str, ...] = (),
        python: Path = Path(sys.executable),
    ):
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / "vllm.log"
        self._process: subprocess.Popen | None = None
        self._environment = environment(directory, python)
        if workers > 1:
            self._environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(workers)))
        self._command = [
            str(python.parent / "vllm"),
            *("serve", str(model), "--port", str(self.port), "--host", "127.0.0.1"),
            *("--dtype", dtype, "--enforce-eager", "--max-model-len", "2048"),
            *("--weight-transfer-config", '{"backend": "syncline"}'),
            *("--tensor-parallel-size", str(workers)),
            *("--enable-scale-out", "--disable-uvicorn-access-log"),
            *more,
        ]

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self.directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.wait_healthy()

    def wait_healthy(self) -> None:
        until_s = time.monotonic() + START_S
        while self.get("/health")[0] != 200:
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"vLLM did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.5)

    def wait_ended(self) -> int:
        return self._process.wait(60)

    def stop(self) -> None:
        if self._process is None:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                try:
                    self._process.wait(20)
                except subprocess.TimeoutExpired:
                    continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def get(self, path: str) -> tuple[int, str]:
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: object = None, **query: str) -> tuple[int, str]:
        request = urllib.request.Request(
            self.url + path + (f"?{urlencode(query)}" if query else ""),
            json.dumps({} if body is None else body).encode(),
            {"Content-Type": "application/json"},
            method="POST",
        )
        return self._ask(request)

    def rpc(self, method: str, *arguments: str) -> list[dict]:
        status, text = self.post("/collective_rpc", {"method": method, "args": list(arguments)})
        assert status == 200, text
        return json.loads(text)["results"]

    def generate(self, ids: list[int], count: int) -> dict:
        """Return the one choice: `token_ids`, `finish_reason`, `weight_versions`."""
        sampling = {"temperature": 0, "max_tokens": count, "ignore_eos": True}
        status, text = self.post(
            "/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling}
        )
        assert status == 200, text
        return json.loads(text)["choices"][0]

    def begin(self, ids: list[int], count: int) -> Running:
        """Start a request and return when it is being generated."""
        before = self._generated()
        running = Running(self, ids, count)
        until_s = time.monotonic() + 60
        while self._generated() < before + 5:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        return running

    def hashes(self) -> list[dict]:
        return self.rpc("faulty_hashes")

    def _generated(self) -> float:
        return sum(
            float(line.split()[-1])
            for line in self.get("/metrics")[1].splitlines()
            if line.startswith("vllm:generation_tokens_total")
        )

    def _ask(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)


class Running:
    """A request in a thread of its own."""

    def __init__(self, server: Served, ids: list[int], count: int) -> None:
        self._found: dict = {}
        self._thread = threading.Thread(
            target=lambda: self._found.update(server.generate(ids, count))
        )
        self._thread.start()

    def result(self) -> dict:
        self._thread.join(120)
        assert self._found, "the request did not end"
        return self._found


class Trainer:
    """Weights that change from version to version, a store, and transformers' own model to compare with."""

    def __init__(self, model: Path, store: Path) -> None:
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        self.model, self.store = model, store
        self.weights = load_file(model / "model.safetensors")
        self.versions: dict[int, dict] = {}
        self.digests: dict[int, str] = {}
        self._publisher = syncline.Publisher(syncline.open_store(store), base=model)
        self._reference = AutoModelForCausalLM.from_pretrained(model).eval()
        self._reference.generation_config.eos_token_id = None  # as vLLM is told to ignore it
        self._publish(self.weights)

    def step(self, seed: int, share: float = 0.05) -> int:
        """Change some of every tensor, publish that, and return the number of the version."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        for tensor in self.weights.values():
            chosen = torch.rand(tensor.shape, generator=generator) < share
            tensor[chosen] += torch.randn(tensor.shape, generator=generator)[chosen] * 0.3
        return self._publish(self.weights)

    def broken(self, change: Callable[[dict], None]) -> int:
        """Publish weights that got broken on the way, so that they are not what the trainer scores with."""
        weights = {name: tensor.clone() for name, tensor in self.weights.items()}
        change(weights)
        return self._publish(weights)

    def score(self, version: int, probes: Sequence[Probe]) -> None:
        """Publish what the trainer's own weights, as they are now, make of the probes."""
        store = syncline.open_store(self.store)
        publish_scores(store, version, self.digests[version], self.scorer(), probes)

    def scorer(self) -> TorchScorer:
        self._reference.load_state_dict(self.weights)
        return TorchScorer(self._reference)

    def tokens(self, version: int, ids: list[int], count: int) -> list[int]:
        """Return what transformers generates, greedily."""
        import torch

        self._reference.load_state_dict(self.versions[version])
        with torch.no_grad():
            found = self._reference.generate(
                torch.tensor([ids]),
                max_new_tokens=count,
                do_sample=False,
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            )
        return found[0, len(ids) :].tolist()

    def choices(self, version: int, ids: list[int]) -> list[int]:
        """Return the likeliest token after each token."""
        import torch

        self._reference.load_state_dict(self.versions[version])
        with torch.no_grad():
            return self._reference(torch.tensor([ids])).logits[0].argmax(-1).tolist()

    def _publish(self, weights: dict) -> int:
        report = self._publisher.publish(weights)
        self.versions[report.version] = {name: tensor.clone() for name, tensor in weights.items()}
        self.digests[report.version] = report.manifest_sha256
        return report.version


def write_model(target: Path, seed: int = 0, *, hidden_size: int = 64, layers: int = 2) -> None:
    """Write a tiny Qwen3 with random weights, and the demo's tokenizer of one token a character."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from syncline.demo.tiny import make_tokenizer

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=98,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)
    tokenizer.save_pretrained(target)


def status_of(url: str) -> dict:
    """Return the one replica that a `syncline serve` answers for."""
    with urllib.request.urlopen(url + PATH, timeout=30) as answer:
        return json.load(answer)["replicas"][0]


def remove(path: Path) -> None:
    shutil.rmtree(path)
