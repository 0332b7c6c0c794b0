"""A worker extension that tests tell to fail on one rank, or to be slow: how they break a real vLLM."""

from __future__ import annotations

import os
import signal
import time

from syncline.vllm.extension import SynclineWorker, session_of


class FaultyWorker(SynclineWorker):
    """`faulty_arm(rank, what)`: the next write on that rank fails so, once."""

    def faulty_arm(self, rank: str, what: str) -> dict:
        if self.rank == int(rank):
            session = session_of(self)
            session.weights = _Faulty(session.weights, what, session)
        return {"error": None}

    def faulty_slow(self, milliseconds: str) -> dict:
        """Take so much longer for every step, so that a request is still there when a test looks."""
        runner = self.model_runner
        vars(runner).pop("execute_model", None)
        if float(milliseconds):
            step = runner.execute_model

            def slowly(*arguments, **more):
                time.sleep(float(milliseconds) / 1000)
                return step(*arguments, **more)

            runner.execute_model = slowly
        return {"error": None}

    def faulty_hashes(self) -> dict:
        """What this worker's parameters and buffers hold, bit for bit, and what its layers compute."""
        import hashlib

        model = self.model_runner.get_model()
        found = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            raw = tensor.detach().contiguous().view(-1).numpy().tobytes()
            found[name] = hashlib.sha256(raw).hexdigest()
        return {"error": None, "hashes": found}


class _Faulty:
    def __init__(self, inner, what: str, session) -> None:
        self._inner = inner
        self._what = what
        self._session = session

    def write(self, copy, *, everything=False) -> None:
        self._session.weights = self._inner
        self._inner.write(copy, everything=everything)
        if self._what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._what == "hang":
            time.sleep(8)
        raise MemoryError("injected in the middle")

    def __getattr__(self, name):
        return getattr(self._inner, name)
