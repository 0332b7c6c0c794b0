"""A vLLM without vLLM: workers are threads, live weights are arrays, and steps can be made to fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import numpy as np

from syncline.errors import EndpointError, TransportTimeoutError
from syncline.kernels import fingerprint, seeds
from syncline.sources import MemorySource
from syncline.types import ZERO, Fingerprint
from syncline.vllm.copy import HostCopy, put
from syncline.vllm.extension import _answer
from syncline.vllm.session import Session


class ThreadWorkers:
    """Workers of one engine as threads of this process."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank, self.count = rank, shared.count
        self._shared = shared

    def gather(self, said, timeout_s):
        said = json.loads(json.dumps(said))
        try:
            self._shared.said[self.rank] = said
            self._shared.barrier.wait(timeout_s)
            everything = list(self._shared.said)
            self._shared.barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise TransportTimeoutError(
                f"worker {self.rank}: another worker did not come"
            ) from None
        return everything


class Shared:
    def __init__(self, count: int) -> None:
        self.count = count
        self.said = [None] * count
        self.barrier = threading.Barrier(count)


class ArrayWeights:
    """Live weights of one worker: every `count`-th tensor of the model, as arrays.

    `fault(step)` is called in the middle of "write" and "undo"; what it raises fails the step there.
    """

    def __init__(self, tensors, rank: int, count: int) -> None:
        self.live = {
            n: b.copy() for i, (n, b) in enumerate(sorted(tensors.items())) if i % count == rank
        }
        self.fault: Callable[[str], None] = lambda step: None

    def prepare(self, copy: HostCopy) -> None:
        pass

    def write(self, copy: HostCopy, *, everything: bool = False) -> None:
        if everything:
            self.live = {name: copy.view(name).copy() for name in self.live}
            return
        try:
            self._put(copy, "write")
        except Exception:
            self.undo(copy)
            raise

    def undo(self, copy: HostCopy) -> None:
        self._put(copy, "undo")

    def _put(self, copy: HostCopy, step: str) -> None:
        records = [r for r in copy.pending if r.name in self.live]
        for i, record in enumerate(records if step == "write" else records[::-1]):
            if i == len(records) // 2:
                self.fault(step)
            put(
                self.live[record.name],
                record,
                record.new_bits if step == "write" else record.old_bits,
            )
        if not records:
            self.fault(step)

    def fingerprint(self, copy: HostCopy) -> Fingerprint:
        return sum((fingerprint(bits, 0, seeds(name)) for name, bits in self.live.items()), ZERO)

    def settle(self) -> None:
        pass


class FakeVllm:
    """A `Control` over sessions in threads. `fail[step]` is raised when that step is asked for.

    `lose[method]` is raised when the workers have done it; `answer` may change what they say.
    """

    def __init__(self, tensors, count: int = 2, timeout_s: float = 5.0) -> None:
        bits = {n: v.reshape(-1).view(f"u{v.itemsize}") for n, v in tensors.items()}
        shared = Shared(count)
        base = {n: v.copy() for n, v in tensors.items()}
        self.weights = [ArrayWeights(bits, rank, count) for rank in range(count)]
        self.sessions = [
            Session(w, ThreadWorkers(rank, shared), lambda: MemorySource(base), timeout_s=timeout_s)
            for rank, w in enumerate(self.weights)
        ]
        self.count = 1
        self.name = "default"
        self.is_paused = False
        self.log: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.lose: dict[str, Exception] = {}
        self.answer: Callable[[str, list], list] = lambda method, answers: answers

    def call(self, method, *arguments, timeout_s):
        self._step(method)
        act = {
            "syncline_open": lambda s, store: s.open(store),
            "syncline_stage": lambda s, v, repair: s.stage(int(v), repair=bool(repair)),
            "syncline_status": lambda s: None,
            "syncline_apply": lambda s: s.apply(),
            "syncline_undo": lambda s: s.undo(),
            "syncline_finish": lambda s: s.finish(),
        }[method]
        answers = [None] * len(self.sessions)

        def work(rank):
            worker = type("Worker", (), {})()
            worker.weight_transfer_engine = type("Engine", (), {"session": self.sessions[rank]})()
            answers[rank] = _answer(worker, lambda session: act(session, *arguments))

        threads = [
            threading.Thread(target=work, args=(rank,)) for rank in range(len(self.sessions))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if method in self.lose:
            raise self.lose.pop(method)
        return self.answer(method, answers)

    def engines(self, timeout_s):
        return self.count

    def pause(self, mode, timeout_s):
        self._step("pause")
        self.is_paused = True

    def resume(self, timeout_s):
        self._step("resume")
        self.is_paused = False

    def paused(self, timeout_s):
        self._step("paused")
        return self.is_paused

    def reset_caches(self, timeout_s):
        self._step("reset_caches")

    def label(self, timeout_s):
        return self.name

    def set_label(self, label, timeout_s):
        self._step("set_label")
        self.name = label

    def _step(self, step):
        if step not in ("syncline_status", "paused"):
            self.log.append(step)
        if step in self.fail:
            raise self.fail.pop(step)

    def bits(self):
        live = {}
        for weights in self.weights:
            live |= weights.live
        return {name: live[name].tobytes() for name in sorted(live)}


def refused(step: str) -> EndpointError:
    return EndpointError(f"{step} was refused", status=500)


def tensors(seed: int):
    random = np.random.default_rng(seed)
    return {f"w{i}": random.standard_normal((8, 16)).astype(np.float32) for i in range(4)}


def changed(weights, seed: int):
    random = np.random.default_rng(seed)
    found = {}
    for name, array in weights.items():
        found[name] = array.copy()
        found[name][random.random(array.shape) < 0.2] += 1.0
    return found


def as_bytes(weights):
    return {name: weights[name].tobytes() for name in sorted(weights)}
