"""A whole run of the demo: base checkpoint, engine process, steps, proof, picture."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from syncline.demo.base import write_base
from syncline.demo.config import DemoConfig, DemoResult
from syncline.demo.display import Display, JsonDisplay, TableDisplay
from syncline.demo.identity import differences
from syncline.demo.loop import Loop
from syncline.demo.models import require
from syncline.demo.picture import draw
from syncline.demo.rollout import EngineProcess, RolloutEngine
from syncline.errors import ConfigError

PICTURE = "syncline-demo.png"

StartEngine = Callable[[Path, str, Path], RolloutEngine]
"""Starts an engine on a checkpoint directory and a store; the third argument is for its log."""


def start_process(base: Path, store: str, log: Path) -> RolloutEngine:
    """Start the transformers engine in a process of its own; it loads while this one goes on."""
    return EngineProcess([sys.executable, "-m", "syncline.demo.engine", str(base), store], log=log)


def starter(engine: str) -> StartEngine:
    """Return what starts an engine of this name; see `config.ENGINES`."""
    if engine == "vllm":
        from syncline.demo.vllm_engine import start_vllm

        return start_vllm
    if engine == "sglang":
        from syncline.demo.sglang_engine import start_sglang

        return start_sglang
    return start_process


def run(config: DemoConfig, start_engine: StartEngine | None = None) -> DemoResult:
    """Train, keep the engine in step through a store, and find out whether it is bit-identical.

    Prints a table, or JSON lines, on standard output, and draws a picture. The verdict is in the
    result: a difference is found, printed and returned, not raised.

    Args:
        config: what to train, for how long, and where.
        start_engine: starts the engine that generates; None: that of `config.engine`. Another back end
            goes in here.

    Raises:
        ConfigError: `config.out` is not new or empty, or a package or the model is missing.
        PeerLostError, TransportTimeoutError: the engine process died, or does not answer.
        SynclineError: a version could not be published or applied.
    After any of them, Ctrl-C and SIGTERM, the engine process is gone and so is the temporary directory.
    """
    start = starter(config.engine) if start_engine is None else start_engine
    display = make_display(config)
    let_threads_sleep()
    with cleaned_up_on_sigterm(), display.live(), working_directory(config.out) as work:
        result = _run(config, work, start, display)
    display.result(result)
    return result


def make_display(config: DemoConfig) -> Display:
    """Return where the run reports to: JSON lines or a table, on standard output."""
    if config.json:
        return JsonDisplay(sys.stdout)
    return TableDisplay(require("rich.console", "rich").Console())


class Terminated(BaseException):
    """SIGTERM came; passes every handler of errors, as `KeyboardInterrupt` does."""


@contextmanager
def cleaned_up_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program only after what was opened inside is closed.

    Does nothing outside the main thread, or where SIGTERM has a handler already.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated


def let_threads_sleep() -> None:
    """Make OpenMP threads that wait sleep, here and in the engine; no effect once torch is loaded.

    Measured for a step of the default demo on two cores: 2.4 s in place of 2.1 s if nothing else runs
    there, but 4 s in place of 20 to 40 s beside a load of 4, where a thread that spins holds up the
    one that it waits for.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def working_directory(out: Path | None) -> Iterator[Path]:
    """Yield the directory to work in: `out`, made if need be and kept, or one that is removed.

    Raises:
        ConfigError: `out` is a file, or a directory with something in it.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="syncline-demo-") as temporary:
            yield Path(temporary)
        return
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(
            f"expected a new or empty directory for the demo's output, found that {out} is a file or "
            "holds something; name another, or remove it"
        )
    out.mkdir(parents=True, exist_ok=True)
    yield out


def _run(config: DemoConfig, work: Path, start_engine: StartEngine, display: Display) -> DemoResult:
    start_s = time.perf_counter()
    base, store = work / "base", str(work / "store")
    written = write_base(config, base, display.phase)
    display.phase("starting the engine, publishing the base")
    with start_engine(base, store, work / "engine.log") as engine:
        loop = Loop(config, base, store, engine)
        report = loop.base_report(written, time.perf_counter() - start_s)
        display.base(report)
        steps = []
        for number in range(1, config.steps + 1):
            steps.append(loop.step(number, display.phase))
            display.step(steps[-1])
        display.phase("hashing every tensor on both sides")
        trainer, held = loop.digests()
    found = differences(trainer, held)
    display.phase("drawing")
    picture = (Path() if config.out is None else config.out) / PICTURE
    draw(report, steps, is_identical=not found, target=picture)
    return DemoResult(
        differences=found,
        tensors=len(trainer),
        base=report,
        steps=tuple(steps),
        picture=picture,
        out=config.out,
        total_s=time.perf_counter() - start_s,
    )
