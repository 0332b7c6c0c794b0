"""A worker extension that tests tell to fail on one rank, or to be slow: how they break a real vLLM."""

from __future__ import annotations

import os
import signal
import time

from syncline.vllm.extension import SynclineWorker, session_of
from vllm_tested_worker import hashes


class FaultyWorker(SynclineWorker):
    """`faulty_arm(rank, what)`: the next write on that rank fails so, once.

    `between`: after half of the records were written; `raise`, `hang`, `die`: when all were.
    """

    def faulty_arm(self, rank: str, what: str) -> dict:
        if self.rank == int(rank):
            session = session_of(self)
            session.weights = _Faulty(session.weights, what, session)
        return {"error": None}

    def faulty_flip(self, rank: str, name: str) -> dict:
        """Flip a bit of a live parameter, as something else than Syncline would."""
        import torch

        if self.rank == int(rank):
            parameter = dict(self.model_runner.get_model().named_parameters())[name]
            parameter.data.view(-1).view(torch.int32)[0] ^= 1 << 20
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
        model = self.model_runner.get_model()
        found = hashes(model)
        return {"error": None, "hashes": found}


def fail_between_writes(update) -> None:
    """Let an update of live memory fail once, when half of its records have been written."""
    count = len(list(update._journal))
    written = []
    target = update._target
    write = target.write

    def failing(record, bits):
        if len(written) == count // 2:
            del target.write
            raise MemoryError(f"injected between write {len(written)} and the next of {count}")
        written.append(record)
        write(record, bits)

    target.write = failing


class _Faulty:
    def __init__(self, inner, what: str, session) -> None:
        self._inner = inner
        self._what = what
        self._session = session

    def write(self, copy, *, everything=False) -> None:
        self._session.weights = self._inner
        if self._what == "between":
            fail_between_writes(self._inner._prepared)
        self._inner.write(copy, everything=everything)
        if self._what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._what == "hang":
            time.sleep(8)
        raise MemoryError("injected in the middle")

    def __getattr__(self, name):
        return getattr(self._inner, name)
