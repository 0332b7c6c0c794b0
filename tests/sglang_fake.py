"""A double of an SGLang server that enforces the rules of one release, as `protocol/*.json` has them.

It has real fused parameters on every rank, written by a loader like SGLang's; what kills the real server kills
it too. It was written from the routes of the releases' own sources, not from Syncline's client.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import pickletools
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file

import slime_oracle
from syncline.sglang import plugin, worker

PATIENCE = timedelta(seconds=30)
PROTOCOL = Path(__file__).parent / "sglang" / "protocol"
VERSIONS = ("0.5.9", "0.5.20", "0.5.21", "0.5.22", "0.5.23")


class FusedModel(torch.nn.Module):
    """One rank's part of a tiny decoder, fused the way SGLang does it, with a derived weight."""

    def __init__(self, config: dict[str, Any], rank: int, ranks: int) -> None:
        super().__init__()
        self.config, self.rank, self.ranks = config, rank, ranks
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        self._heads = config["num_attention_heads"] // ranks
        self._kv_heads = max(1, config["num_key_value_heads"] // ranks)
        side, inner = config["head_dim"], config["intermediate_size"] // ranks

        def made(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)

        own = {"embed": made(vocab // ranks + 8, hidden), "norm": made(hidden)}
        own["head"] = made(vocab // ranks + 8, hidden)
        for layer in range(config["num_hidden_layers"]):
            qkv = (self._heads + 2 * self._kv_heads) * side
            own |= {
                f"{layer}_qkv": made(qkv, hidden),
                f"{layer}_o": made(hidden, self._heads * side),
                f"{layer}_gate_up": made(2 * inner, hidden),
                f"{layer}_down": made(hidden, inner),
            }
            for name in ("input", "post"):
                own[f"{layer}_{name}"] = made(hidden)
            for name in ("q_norm", "k_norm"):
                own[f"{layer}_{name}"] = made(side)
        self.own = torch.nn.ParameterDict(own)
        self.derived = torch.zeros(hidden)
        self.scale = torch.nn.Module()
        self.scale.register_parameter("weight", torch.nn.Parameter(torch.zeros(4)))

    def load_weights(self, weights: Any) -> None:
        """Copy what is known, skip what is not, without a word."""
        for name, tensor in weights:
            target, loaded = self._place(name, tensor)
            if target is not None:
                target.data.copy_(loaded)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        """Make what is computed from the weights."""
        self.derived = self.own["norm"].data.float() * 2

    def _place(self, name: str, tensor: Any) -> tuple[Any, Any]:
        config, rank, ranks = self.config, self.rank, self.ranks
        side, inner = config["head_dim"], config["intermediate_size"] // ranks
        share = config["vocab_size"] // ranks
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            own = self.own["embed" if "embed" in name else "head"]
            return own[:share], tensor.narrow(0, rank * share, share)
        if name == "model.norm.weight":
            return self.own["norm"], tensor
        if not name.startswith("model.layers."):
            return None, None
        layer, kind = name.removeprefix("model.layers.").split(".", 1)
        kind = kind.removesuffix(".weight").rsplit(".", 1)[-1]
        q = self._heads * side
        kv = self._kv_heads * side
        kv_rank = rank * config["num_key_value_heads"] // ranks
        match kind:
            case "q_proj":
                return self.own[f"{layer}_qkv"][:q], tensor.narrow(0, rank * q, q)
            case "k_proj":
                return self.own[f"{layer}_qkv"][q : q + kv], tensor.narrow(0, kv_rank * side, kv)
            case "v_proj":
                return self.own[f"{layer}_qkv"][q + kv :], tensor.narrow(0, kv_rank * side, kv)
            case "o_proj":
                return self.own[f"{layer}_o"], tensor.narrow(1, rank * q, q)
            case "gate_proj":
                return self.own[f"{layer}_gate_up"][:inner], tensor.narrow(0, rank * inner, inner)
            case "up_proj":
                return self.own[f"{layer}_gate_up"][inner:], tensor.narrow(0, rank * inner, inner)
            case "down_proj":
                return self.own[f"{layer}_down"], tensor.narrow(1, rank * inner, inner)
            case "q_norm" | "k_norm":
                return self.own[f"{layer}_{kind}"], tensor
            case "input_layernorm":
                return self.own[f"{layer}_input"], tensor
            case "post_attention_layernorm":
                return self.own[f"{layer}_post"], tensor
        return None, None


class _DiedError(Exception):
    """The scheduler is gone, and the server with it."""


class FakeSglang:
    """One server; `faults` breaks a route once: `before` and `after` it does its work.

    A fault is 'lost' (the connection is cut), 'hangs' (it does not answer), 'late' (it does its work when
    `has_given_up` is set), 'dies', or a refusal's text. `lies` are answers of routes that do nothing else.
    """

    def __init__(
        self,
        version: str,
        model: Path,
        *,
        ranks: int = 1,
        staging: Path | None = None,
        loaders: tuple[str, ...] = (),
        label: str = "default",
        hooked: bool = False,
        pulls: bool = False,
        token: str | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.rules = json.loads((PROTOCOL / f"{version}.json").read_text())
        if pulls:
            self.rules["routes"].append("/pull_weights")
        self.ranks = ranks
        self.staging = staging
        self.loaders = loaders
        self.model_path = str(model)
        self.labels = {"scheduler": label, "tokenizer": label}
        self.about = about or {}
        self.pulled = 1
        self.token = token
        self.hooked = hooked
        self.faults: dict[str, tuple[str, str]] = {}
        self.lies: dict[str, Any] = {}
        self.groups: dict[str, list[Any]] = {}
        self.has_given_up = threading.Event()
        self.start = uuid.uuid4().int
        self.calls: list[str] = []
        self.running: list[str] = []
        self.waiting: list[str] = []
        self.aborted: list[str] = []
        self.is_paused = self.is_frozen = self.is_dead = False
        self.session: dict[str, bool] | None = None
        self.cached_under: str | None = None
        config = json.loads((model / "config.json").read_text())
        self.models = [FusedModel(config, rank, ranks) for rank in range(ranks)]
        self._load(load_file(model / "model.safetensors"))
        self._lock = threading.Lock()
        self._late: list[threading.Thread] = []
        self._has_replied = threading.Event()
        self._hang = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                server._serve(self, None)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                server._serve(self, self.rfile.read(length))

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._hang.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def restart(self, model: Path, label: str) -> None:
        """Be another process at the same address, as a supervisor starts it, from a checkpoint."""
        self.start = uuid.uuid4().int
        self.model_path, self.labels = str(model), dict.fromkeys(self.labels, label)
        self.session, self.is_paused = None, False
        self.models = [FusedModel(m.config, m.rank, m.ranks) for m in self.models]
        self._load(load_file(model / "model.safetensors"))

    @property
    def label(self) -> str:
        return self.labels["tokenizer"]

    def weights(self) -> list[dict[str, torch.Tensor]]:
        """Return what every rank holds, with what it derives."""
        return [
            {
                **{k: v.detach().clone() for k, v in m.named_parameters()},
                "derived": m.derived.clone(),
            }
            for m in self.models
        ]

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        for model in self.models:
            model.load_weights(tensors.items())

    def _serve(self, request: BaseHTTPRequestHandler, raw: bytes | None) -> None:
        path = request.path.partition("?")[0]
        if self.is_dead:
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
            return
        if self.token is not None and request.headers["Authorization"] != f"Bearer {self.token}":
            request.send_response(401)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        self.calls.append(path)
        when, fault = self.faults.pop(path, ("", ""))
        try:
            if when == "before":
                self._break(fault)
            status, body = self._answer(path, None if not raw else json.loads(raw))
            if when == "after":
                self._break(fault)
        except _RefusedError as error:
            status, body = 400, {"success": False, "message": str(error)}
        except (_DiedError, _LostError, RuntimeError) as error:
            # What is not caught in the scheduler ends it.
            self.is_dead = not isinstance(error, _LostError)
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
            return
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        with suppress(OSError):  # whoever asked has given up
            request.end_headers()
            request.wfile.write(data)
        self._has_replied.set()

    def _break(self, fault: str) -> None:
        if fault == "lost":
            raise _LostError
        if fault == "dies":
            raise _DiedError
        if fault == "hangs":
            self._hang.wait(30)
            raise _LostError
        if fault == "late":
            self.has_given_up.wait(30)
            return
        raise _RefusedError(fault)

    def _answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if path not in self.rules["routes"]:
            return 404, {"detail": "Not Found"}
        if path in self.lies:
            return 200, self.lies[path]
        if path == "/ready":
            return 503 if self.is_paused else 200, b""
        routes: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/server_info": self._server_info,
            "/model_info": lambda _: {
                "model_path": self.model_path,
                "weight_version": self.labels["tokenizer"],
            },
            "/openapi.json": lambda _: {"paths": {route: {} for route in self.rules["routes"]}},
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_tensor": self._from_tensor,
            "/init_weights_update_group": self._join_group,
            "/destroy_weights_update_group": self._leave_group,
            "/update_weights_from_distributed": self._from_distributed,
            "/update_weight_version": self._version,
            "/weights_checker": self._checker,
            "/pull_weights": self._pull,
        }
        if path in ("/begin_weight_update", "/end_weight_update") and body is None:
            raise _RefusedError("Field required")
        with self._lock:
            for thread in self._late:  # a rank does one thing after the other
                thread.join()
            return 200, routes[path](body if body is not None else {})

    def _server_info(self, _: dict[str, Any]) -> dict[str, Any]:
        return {
            "version": self.rules["version"],
            "tp_size": self.ranks,
            "dp_size": 1,
            "pp_size": 1,
            "custom_weight_loader": list(self.loaders),
            "speculative_algorithm": None,
            "random_seed": self.start,
            **self.about,
        }

    def _pause(self, body: dict[str, Any]) -> Any:
        mode = body.get("mode", "abort")
        self.is_paused = True
        if mode == "abort":
            self.aborted += self.running + self.waiting
            self.running, self.waiting = [], []
        elif mode == "retract":
            self.waiting += self.running
            self.running = []
        return {"status": "ok"}

    def _continue(self, _: dict[str, Any]) -> Any:
        self.is_paused = False
        self.running += self.waiting
        self.waiting = []
        self.cached_under = self.checksum()
        return {"status": "ok"}

    def _can_flush(self) -> bool:
        waiting_counts = not (self.is_paused and self.rules["flush_while_retracted"])
        if self.running or (self.waiting and waiting_counts):
            return False
        self.cached_under = None
        return True

    def _flush(self, _: dict[str, Any]) -> Any:
        if not self._can_flush():
            raise _RefusedError("Flush cache failed.")
        return b"Cache flushed."

    def _begin(self, _: dict[str, Any]) -> Any:
        if self.session is not None:
            raise _RefusedError(self.rules["second_begin"])
        self.session = {"loaded": False}
        return {"success": True, "message": "Success"}

    def _end(self, _: dict[str, Any]) -> Any:
        if self.session is None:
            raise _RefusedError(self.rules["end_without_begin"])
        if not self.session["loaded"]:
            for model in self.models:
                model.post_load_weights()
        self.session = None
        return {"success": True, "message": "Success"}

    def _from_disk(self, body: dict[str, Any]) -> Any:
        path = Path(body["model_path"])
        if body.get("load_format") not in (None, "auto"):
            raise _DiedError
        if self.hooked:
            answers = self._hooked_load(path)
            if not answers[0]:
                raise _RefusedError(answers[1])
            if path == self.staging:
                return self._updated(body)
        if not path.is_dir() or not [*path.glob("*.safetensors")]:
            raise _RefusedError(f"Failed to get weights iterator: {path}")
        self.model_path = str(path)
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            tensors |= load_file(file)
        self._load(tensors)  # a shape that does not fit raises: "rolling back" raises again
        return self._updated(body)

    def _hooked_load(self, path: Path) -> tuple[bool, str]:
        """Call the hook on every rank; as there, the first one's answer is the reply, the others come later."""

        def call(rank: int) -> tuple[bool, str]:
            model = self.models[rank]
            updater = SimpleNamespace(get_model=lambda: model, tp_rank=rank)
            return plugin.around(lambda *_: (True, "not ours"), updater, str(path))

        def later(rank: int) -> None:
            self._has_replied.wait(30)
            call(rank)

        self._has_replied.clear()
        self._late = [threading.Thread(target=later, args=(rank,)) for rank in range(1, self.ranks)]
        for thread in self._late:
            thread.start()
        return call(0)

    def _from_tensor(self, body: dict[str, Any]) -> Any:
        if self.rules["tensors_outside_session"] is not None:
            if self.session is None:
                route = "update_weights_from_tensor"
                raise _RefusedError(self.rules["tensors_outside_session"].format(route=route))
            self.session["loaded"] = True
        if body.get("load_format") == "flattened_bucket":
            for model, payload in zip(self.models, body["serialized_named_tensors"], strict=True):
                model.load_weights(_unpacked(payload))
            return self._updated(body)
        if body.get("load_format") not in self.loaders:
            raise _DiedError
        payloads = [base64.b64decode(p, validate=True) for p in body["serialized_named_tensors"]]
        for payload in payloads:
            operations = [op.name for op, _, _ in pickletools.genops(payload)]
            assert "GLOBAL" not in operations and "STACK_GLOBAL" not in operations
        for rank, model in enumerate(self.models):
            assert payloads[rank]
            self.obey(model, rank)
        return self._updated(body)

    def obey(self, model: FusedModel, rank: int) -> None:
        """Call the loader as one rank does; a test may break it."""
        assert self.staging is not None
        worker.obey(model, self.staging, rank)

    def _join_group(self, body: dict[str, Any]) -> Any:
        name, size = body["group_name"], body["world_size"]
        groups: list[Any] = [None] * self.ranks

        def join(rank: int) -> None:
            store: Any = dist.TCPStore(
                body["master_address"], body["master_port"], size, False, PATIENCE
            )
            for prefix in (name, f"{name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            at = body["rank_offset"] + rank
            groups[rank] = (store, dist.ProcessGroupGloo(store, at, size, PATIENCE))

        self._on_every_rank(join)
        self.groups[name] = groups
        return {"success": True, "message": "Success"}

    def _leave_group(self, body: dict[str, Any]) -> Any:
        if self.groups.pop(body["group_name"], None) is None:
            raise _RefusedError("The group to be destroyed does not exist.")
        return {"success": True, "message": "Success"}

    def _from_distributed(self, body: dict[str, Any]) -> Any:
        if self.rules["tensors_outside_session"] is not None:
            if self.session is None:
                route = "update_weights_from_distributed"
                raise _RefusedError(self.rules["tensors_outside_session"].format(route=route))
            self.session["loaded"] = True
        assert body["load_format"] == "flattened_bucket"
        metas = [
            (name, getattr(torch, dtype), shape)
            for name, dtype, shape in zip(
                body["names"], body["dtypes"], body["shapes"], strict=True
            )
        ]

        def receive(rank: int) -> None:
            sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in metas]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            self.groups[body["group_name"]][rank][1].broadcast([flat], options).wait()
            pieces = zip(metas, flat.split(sizes), strict=True)
            self.models[rank].load_weights(
                [(name, raw.view(dtype).reshape(shape)) for (name, dtype, shape), raw in pieces]
            )

        self._on_every_rank(receive)
        return self._updated(body)

    def _on_every_rank(self, do: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(self.ranks) as pool:
            list(pool.map(do, range(self.ranks)))

    def _pull(self, body: dict[str, Any]) -> Any:
        """Patch the local checkpoint with a reader of the layout that was written from its description."""
        file = Path(body["local_checkpoint_dir"]) / "model.safetensors"
        if body["target_version"] < self.pulled:
            raise _RefusedError("out of order")
        weights = load_arrays(file)
        for version in range(self.pulled + 1, body["target_version"] + 1):
            delta = Path(body["source_dir"]) / f"weight_v{version:06d}"
            weights = slime_oracle.apply_delta(delta, weights)
        save_arrays(weights, file, metadata={"format": "pt"})
        self.pulled = body["target_version"]
        return {"success": True}

    def _updated(self, body: dict[str, Any]) -> Any:
        if body.get("weight_version") is not None:
            self.labels["scheduler"] = body["weight_version"]
        if body.get("flush_cache", True) and not self._can_flush():
            if self.rules["refused_flush_of_an_update"] == "dies":
                raise _DiedError
            raise _RefusedError(self.rules["refused_flush_of_an_update"])
        if body.get("weight_version") is not None:
            self.labels["tokenizer"] = body["weight_version"]
        return {"success": True, "message": "Success"}

    def _version(self, body: dict[str, Any]) -> Any:
        if body.get("abort_all_requests", True):
            self.aborted += self.running + self.waiting
            self.running, self.waiting = [], []
        self.labels = dict.fromkeys(self.labels, body["new_version"])
        return {"success": True, "message": "", "new_version": body["new_version"]}

    def checksum(self) -> str:
        """Return one digest of everything that every rank holds."""
        return self._checksums()["per_engine_checksum"]

    def _checker(self, body: dict[str, Any]) -> Any:
        if not self.rules["checksums"]:
            raise _RefusedError("Unsupported action='checksum'")
        return {"success": True, "message": "Success.", **self._checksums()}

    def _checksums(self) -> dict[str, Any]:
        ranks = []
        for model in self.models:
            found = {
                name: hashlib.sha256(p.detach().view(torch.uint8).numpy().tobytes()).hexdigest()[
                    :16
                ]
                for name, p in model.named_parameters()
            }
            ranks.append({"checksums": found, "per_gpu_checksum": _digest(json.dumps(found))})
        return {"ranks": ranks, "per_engine_checksum": _digest(json.dumps(ranks))}


def _unpacked(payload: str) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a flat bucket, as a rank reads them: out of shared memory that it opens by name."""
    read = ForkingPickler.loads(base64.b64decode(payload, validate=True))
    flat = read["flattened_tensor"]
    return [
        (at.name, flat[at.start_idx : at.end_idx].view(at.dtype).reshape(at.shape).clone())
        for at in read["metadata"]
    ]


class _RefusedError(Exception):
    """HTTP 400."""


class _LostError(Exception):
    """The connection is cut."""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
