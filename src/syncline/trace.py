"""What ran when on which thread, in the form that Perfetto and Chrome's tracing page open."""

from __future__ import annotations

import json
import os
import threading
import time
from os import PathLike
from pathlib import Path
from typing import Any


class Trace:
    """Collects the phases of every operation that it is given to: `Publisher(store, trace=trace)`.

    Memory: some 200 bytes a phase, until it is written.

    Example:
        >>> trace = Trace()
        >>> trace.add("encode", 1.0, 1.5)
        >>> event = trace.events()[-1]
        >>> event["name"], event["dur"]
        ('encode', 500000.0)
    """

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._threads: dict[int, str] = {}

    def add(self, name: str, started_s: float, ended_s: float) -> None:
        """Note that this thread did `name` from then to then, in seconds of `time.perf_counter`."""
        thread = threading.get_native_id()
        self._threads[thread] = threading.current_thread().name
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "pid": os.getpid(),
                "tid": thread,
                "ts": round(1e6 * (started_s - self._started_s), 3),
                "dur": round(1e6 * (ended_s - started_s), 3),
            }
        )

    def events(self) -> list[dict[str, Any]]:
        """Return trace events: the names of the threads, then what they did; times in microseconds."""
        names = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": os.getpid(),
                "tid": thread,
                "args": {"name": name},
            }
            for thread, name in self._threads.items()
        ]
        return [*names, *self._events]

    def write(self, path: str | PathLike[str]) -> None:
        """Write the events as a JSON file for ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))
