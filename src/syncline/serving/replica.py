"""One engine that follows orders: a thread pulls versions one by one, everybody may ask how it stands."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, Self

from syncline.abc import Engine, Store
from syncline.errors import ConfigError, SynclineError, TornUpdateError
from syncline.hotload import ReplicaStatus, identity
from syncline.serving import order as orders
from syncline.serving.admission import Admission
from syncline.serving.order import Order
from syncline.serving.puller import EnginePuller, Puller
from syncline.sync.checks import check_kind
from syncline.sync.history import read_head
from syncline.sync.layout import own_history
from syncline.types import Step
from syncline.version import HeldVersion

Load = Callable[[HeldVersion], None]
ResetCache = Callable[[Literal[True, "new_session"]], None]

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 30.0

_log = logging.getLogger(__name__)


class Replica:
    """Keeps one engine on the version that was last ordered, and says truly what it serves.

    It starts with the version that the store names as current, and is not ready before it holds that. Orders
    are followed one at a time; one that waits is replaced by a later one. If one fails, what was served is
    served on, and `status` says why; it is followed again when it is ordered again.

    Args:
        store: where a `Publisher` writes.
        engine: what serves the weights, or a `Puller`; only this replica may change it.
        name: shown as `replica`.
        load: called with every version that the engine has taken, before it is reported: where the engine
            is a directory, make the serving process load it here.
        reset_cache: called after that, with True or `"new_session"`, unless the order says False: make the
            prompt cache forget what older weights computed.
        follow_s: look so often whether the store has a new current version, and load that; an ordered
            version stays until then. None: orders alone.
        drain_timeout_s: how long a commit waits for requests that are pinned to other versions.
        repair: begin with a full version, and believe nothing that the engine says it holds.

    A hook that raises leaves the replica unready, serving no known version, until an order succeeds.

    Example:
        >>> import numpy as np, syncline, time
        >>> store, engine = syncline.MemoryStore(), syncline.MemoryEngine()
        >>> _ = syncline.Publisher(store).publish({"w": np.ones(4, np.float32)})
        >>> with Replica(store, engine) as replica:
        ...     while not replica.status().readiness:
        ...         time.sleep(0.01)
        ...     replica.status().identity
        'weight_v000001'
    """

    def __init__(
        self,
        store: Store,
        engine: Engine | Puller,
        *,
        name: str = "0",
        load: Load | None = None,
        reset_cache: ResetCache | None = None,
        follow_s: float | None = None,
        drain_timeout_s: float = 60.0,
        repair: bool = False,
    ) -> None:
        check_kind("store", store, Store)
        if not isinstance(engine, Puller):
            check_kind("engine", engine, Engine)
        if follow_s is not None and not follow_s > 0:
            raise ConfigError(f"follow_s must be above 0, found {follow_s}")
        self.name = name
        self.admission = Admission()
        self._store = store
        self._engine: Puller = (
            EnginePuller(
                store,
                engine,
                lambda at: self.admission.let_pass(at, drain_timeout_s),
                self._observe,
            )
            if isinstance(engine, Engine)
            else engine
        )
        self._load_hook = load
        self._reset_hook = reset_cache
        self._follow_s = follow_s
        self._drain_timeout_s = drain_timeout_s
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._waiting: Order | None = Order(None)
        self._running: Order | None = None
        self._done_bytes = self._total_bytes = 0
        self._served: HeldVersion | None = None
        self._error: str | None = None
        self._loads = self._failures = 0
        self._needs_repair = repair
        self._owes_reset = False
        self._has_caught_up = False
        self._head: bytes | None = None
        self._spelling: identity.Spelling = "directory"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the thread that pulls; the first thing it does is to catch up with the store.

        Raises:
            ConfigError: it was started before.
        """
        if self._thread is not None:
            raise ConfigError("this replica was started before; make another")
        self._thread = threading.Thread(target=self._work, name=f"syncline-replica-{self.name}")
        self._thread.start()

    def close(self) -> None:
        """Stop, and return when the thread has ended; harmless when called again.

        A pull that has not reached the engine is given up; one that changes it is finished first.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self.admission.close()
        if self._thread is not None:
            self._thread.join()

    def check(self, order: Order) -> None:
        """Check that an order can be followed; see `syncline.serving.order.check`.

        Raises:
            ConfigError: it wants the prompt cache reset, and there is nothing to do that with.
        """
        if order.reset not in (None, False) and self._reset_hook is None:
            raise ConfigError(
                f"reset_prompt_cache: replica {self.name} has no prompt cache that it could reset; leave "
                "the field out, or give the replica a reset_cache"
            )
        with self._changed:
            served = self._served
        orders.check(order, self._store, served)

    def take(self, order: Order) -> bool:
        """Take an order that was checked; return False if there is nothing to do for it."""
        with self._changed:
            self._spelling = order.spelling
            is_idle = self._waiting is None and self._running is None and self._error is None
            if is_idle and self._served is not None and self._served.version == order.version:
                return False
            replaced = self._waiting
            if replaced is not None and replaced.reset is not False and order.reset is False:
                order = replace(order, reset=replaced.reset)  # it was promised
            self._waiting = order
            self._changed.notify_all()
            return True

    def status(self) -> ReplicaStatus:
        """Return what the replica serves, and whether that is what it should."""
        with self._changed:
            order = self._running if self._waiting is None else self._waiting
            served = self._served
            current = None if served is None else identity.spell(served.version, self._spelling)
            if order is not None:
                return self._says(current, "loading", self._progress(order))
            if self._error is not None:
                return self._says(current, "error", self._error)
            return self._says(current, "done")

    def figures(self) -> dict[str, float]:
        """Return how the replica stands, by name of a metric; see `syncline.serving.metrics`."""
        is_ready = self.status().readiness
        with self._changed:
            figures = {
                "syncline_ready": float(is_ready),
                "syncline_loads_total": float(self._loads),
                "syncline_failures_total": float(self._failures),
                **self._engine.figures(),
            }
            if self._served is not None:
                figures["syncline_version"] = float(self._served.version)
            return figures

    def _says(self, current: str | None, stage: str, reason: str | None = None) -> ReplicaStatus:
        is_ready = stage == "done"
        return ReplicaStatus(is_ready, current, reason, stage, self.name)

    def _work(self) -> None:
        """Follow orders until the replica is closed."""
        pause_s = FIRST_RETRY_S
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closing or self._waiting is not None, self._patience_s(pause_s)
                )
                if self._is_closing:
                    return
                is_asked = self._waiting is not None
            if not is_asked and self._has_caught_up and not self._has_work():
                continue
            with self._changed:
                order = Order(None) if self._waiting is None else self._waiting
                self._waiting, self._running = None, order
                self._done_bytes = self._total_bytes = 0
            self._follow(order)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    def _patience_s(self, pause_s: float) -> float | None:
        """Return how long to wait for an order before looking at the store unasked."""
        return self._follow_s if self._has_caught_up else pause_s

    def _has_work(self) -> bool:
        """Tell whether an unasked load is due: the store has moved on, or the engine lost what it had."""
        if self._is_serving():
            return self._has_head_moved()
        with self._changed:
            self._served, self._error = None, "the engine does not answer, or was started anew"
        return True

    def _is_serving(self) -> bool:
        try:
            return self._engine.is_serving()
        except Exception as error:  # noqa: BLE001 - whatever it is, the thread lives on, and the replica is not ready
            _log.warning(
                "replica %s: the engine could not be asked: %s", self.name, error, exc_info=error
            )
            return False

    def _has_head_moved(self) -> bool:
        """Tell whether the store names another current version than when it was last loaded."""
        try:
            return self._error is not None or read_head(self._store) != self._head
        except Exception as error:  # noqa: BLE001 - the same
            _log.warning("replica %s: the store could not be read: %s", self.name, error)
            return False

    def _follow(self, order: Order) -> None:
        """Bring the engine to the ordered version, run the hooks, and say what is served now."""
        error: str | None = None
        try:
            head = read_head(self._store)
            own_history(self._store)
            self._engine.sync(order.version, repair=self._needs_repair)
            self._needs_repair, self._head = False, head
        except Exception as failure:  # noqa: BLE001 - whatever it is, the replica serves on and says it
            error = self._failure(failure)
        try:
            served = self._commit(order)
        except Exception as failure:  # noqa: BLE001 - the same
            served, error = None, self._failure(failure)
        with self._changed:
            is_news = error is None and served is not self._served
            self._loads += is_news
            self._failures += error is not None
            self._has_caught_up = self._has_caught_up or error is None
            self._served = served
            self._error = error
            self._running = None
        self.admission.settle(None if served is None else served.version)
        if is_news and served is not None:
            _log.info("replica %s: serves version %d", self.name, served.version)

    def _commit(self, order: Order) -> HeldVersion | None:
        """Run the hooks for what the engine holds, if that is news; return what is served now.

        The engine may hold news after an error too: a version on the way to the ordered one.
        """
        held = None if self._needs_repair else self._engine.held()
        if held is None or (self._served is not None and self._served.sha256 == held.sha256):
            return held
        self.admission.let_pass(held.version, self._drain_timeout_s)
        if self._load_hook is not None:
            self._load_hook(held)
        if self._reset_hook is not None and (self._owes_reset or order.reset is not False):
            self._owes_reset = True  # also by the next order, should this fail
            self._reset_hook("new_session" if order.reset == "new_session" else True)
            self._owes_reset = False
        return held

    def _failure(self, failure: Exception) -> str:
        if isinstance(failure, _ClosedError):
            return str(failure)
        if isinstance(failure, TornUpdateError):
            self._needs_repair = True
        is_ours = isinstance(failure, SynclineError)
        _log.warning("replica %s: %s", self.name, failure, exc_info=None if is_ours else failure)
        return f"{type(failure).__name__}: {failure}"

    def _observe(self, step: Step) -> None:
        with self._changed:
            self._done_bytes, self._total_bytes = step.done_bytes, step.total_bytes
            if self._is_closing:
                raise _ClosedError("the replica is closing")

    def _progress(self, order: Order) -> str:
        what = "the current version" if order.version is None else f"version {order.version}"
        share = f", {self._done_bytes / self._total_bytes:.0%}" if self._total_bytes else ""
        return f"loading {what}{share}"


class _ClosedError(SynclineError):
    """The pull was given up because the replica is closing; everything is as it was."""
