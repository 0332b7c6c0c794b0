"""What the trainer asks of a rollout engine, and the trainer's end of an engine in another process.

`RolloutEngine` is all that the loop knows: an engine on another back end implements it and is
served by `syncline.demo.engine.serve`. `EngineProcess` speaks one JSON object a line with the
process that it started. It never waits for ever: a dead or silent engine is an error.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from syncline.errors import FormatError, PeerLostError, SynclineError, TransportTimeoutError

LOG_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Synced:
    """The version that an engine now holds, verified, and the seconds that each phase took."""

    version: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """What to generate: `samples` completions for each prompt.

    Attributes:
        prompts: token ids of each prompt.
        samples: completions per prompt.
        max_new_tokens: length at which a completion is cut off.
        stop: text; a completion ends with the token that brings it.
        seed: the same seed on the same weights gives the same completions on the same machine.
    """

    prompts: Sequence[Sequence[int]]
    samples: int
    max_new_tokens: int
    stop: str
    seed: int


class RolloutEngine(ABC):
    """Generates completions, on the weights of the version that it last synced.

    Attributes:
        unsigned_zeros: names of tensors whose digest is that of the tensor plus 0, so that -0.0 counts as 0.0.
    """

    unsigned_zeros: frozenset[str] = frozenset()

    @abstractmethod
    def sync(self) -> Synced:
        """Bring the weights to the newest version in the store."""

    @abstractmethod
    def rollout(self, request: RolloutRequest) -> list[list[list[int]]]:
        """Return the token ids of the completions: by prompt, by sample, by place."""

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every tensor in the memory that generates, by canonical name.

        It also says in `unsigned_zeros` of which tensors the engine could not tell -0.0 from 0.0.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the engine and free what it holds; harmless when called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineProcess(RolloutEngine):
    """A rollout engine in a process of its own, as the trainer sees it.

    Args:
        command: program and arguments; it reads requests from its standard input until that ends
            and writes one reply a line.
        log: file that takes the process's standard error.
        timeout_s: how long any one reply may take.

    Raises:
        PeerLostError: the process ended; the message ends with the last lines of its log.
        TransportTimeoutError: no reply came in time. The process is killed then.
        SynclineError: the engine replied with an error.
    """

    def __init__(self, command: Sequence[str], *, log: Path, timeout_s: float = 300.0) -> None:
        self._log = log
        self._timeout_s = timeout_s
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
            )
        self._replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def sync(self) -> Synced:
        """See `RolloutEngine.sync`."""
        return Synced(**self._ask("sync"))

    def rollout(self, request: RolloutRequest) -> list[list[list[int]]]:
        """See `RolloutEngine.rollout`."""
        completions: list[list[list[int]]] = self._ask("rollout", asdict(request))
        return completions

    def digests(self) -> dict[str, str]:
        """See `RolloutEngine.digests`."""
        digests: dict[str, str] = self._ask("digests")
        return digests

    def close(self) -> None:
        """End the process, at once if it is busy, and wait until it is gone."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # A request that the process did not read is still in the buffer, and lost with it.
                with suppress(BrokenPipeError):
                    pipe.close()

    def _ask(self, act: str, arguments: Mapping[str, Any] | None = None) -> Any:
        line = json.dumps({"act": act, "arguments": {} if arguments is None else arguments})
        stdin = self._process.stdin
        try:
            if stdin is not None:
                stdin.write(line.encode() + b"\n")
                stdin.flush()
        except BrokenPipeError as error:
            raise self._lost(act) from error
        return self._reply(act)

    def _reply(self, act: str) -> Any:
        try:
            line = self._replies.get(timeout=self._timeout_s)
        except queue.Empty:
            self._process.kill()
            raise TransportTimeoutError(
                f"the rollout engine (process {self._process.pid}) did not answer {act!r} within "
                f"{self._timeout_s:.0f} s and was killed; {log_tail(self._log)}"
            ) from None
        if line is None:
            raise self._lost(act)
        reply = json.loads(line)
        if "error" in reply:
            raise SynclineError(f"the rollout engine could not {act}: {reply['error']}")
        return reply["result"]

    def _lost(self, act: str) -> PeerLostError:
        status = self._process.wait()
        return PeerLostError(
            f"the rollout engine (process {self._process.pid}) ended with status {status} while "
            f"the trainer waited for {act!r}; {log_tail(self._log)}"
        )

    def _read(self) -> None:
        stdout = self._process.stdout
        if stdout is not None:
            for line in stdout:
                self._replies.put(line)
        self._replies.put(None)


def grouped(
    engine: str, request: RolloutRequest, completions: Sequence[list[int]]
) -> list[list[list[int]]]:
    """Return completions that came one after the other by prompt and sample.

    Raises:
        FormatError: they are not as many as were asked for, or one is empty.
    """
    expected = len(request.prompts) * request.samples
    if len(completions) != expected or not all(completions):
        raise FormatError(
            f"{engine}: expected {expected} completions, none of them empty, found {len(completions)}"
        )
    return [
        list(completions[at : at + request.samples]) for at in range(0, expected, request.samples)
    ]


def log_tail(log: Path) -> str:
    """Return how a process's log ends, to be put behind a message."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "its log ends: " + "\n  ".join(lines) if lines else "its log is empty"
