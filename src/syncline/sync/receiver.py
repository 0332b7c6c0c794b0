"""The engine's side: bring an engine from the version it holds to one that the store has."""

from __future__ import annotations

import time
from typing import Literal

from syncline import interchange
from syncline.abc import Engine, Inlet, Observe, Store, ignore
from syncline.errors import BaseVersionError, ConfigError, TransportTimeoutError
from syncline.sync.accounting import Moved
from syncline.sync.checks import adopt, check_kind, verify_engine
from syncline.sync.early import EarlyPart
from syncline.sync.follow import Follower
from syncline.sync.followed import number_of
from syncline.sync.history import History
from syncline.sync.layout import AUTO, CHOICES, foreign_layout, lacks
from syncline.sync.live import Taker
from syncline.sync.meeting import Doorway
from syncline.sync.metered import MeteredStore
from syncline.sync.phases import Phases
from syncline.sync.pull import Pull
from syncline.sync.reports import AppliedVersion
from syncline.trace import Trace
from syncline.types import Step, check_seconds
from syncline.version import HeldVersion, Kind

Verify = Literal["changed", "full"]


class Receiver:
    """Keeps one engine on the versions of one store.

    Args:
        store: where a `Publisher` writes, or another project's publisher; or an `Inlet`
            (`syncline.channels`), the engine's end of a publisher's live path. What comes is the same
            version, so that an engine may change from one to the other between two calls of `sync`.
        engine: what serves the weights; see `syncline.abc.Engine`.
        verify: `changed` proves each changed tensor's fingerprint from the bits that stood in the engine
            and the bits that replace them, before the first one is written, and reads the changed
            places back afterwards: O(changes), and blind to what somebody else wrote elsewhere. `full` also
            reads every tensor again after `sync`.
        observe: told of every step in `syncline.sync.pull.STEPS` and the bytes done, for progress bars;
            steps of fetching come from another thread.
        trace: collects what ran when; see `syncline.Trace`.
        layout: `syncline`, the name of a foreign layout (`syncline.interchange.NAMES`), or `auto`: what
            lies in the store.
        transport: `auto`: go by what the run's publisher chose, as the store says: join its live path, or
            pull. None: pull, or take from the inlet.

    Example:
        >>> import numpy as np, syncline
        >>> store, engine = syncline.MemoryStore(), syncline.MemoryEngine()
        >>> publisher = syncline.Publisher(store)
        >>> _ = publisher.publish({"w": np.array([1.0, 2.0], np.float32)})
        >>> syncline.Receiver(store, engine).sync().version
        1
        >>> engine.view("w").view(np.float32).tolist()
        [1.0, 2.0]
    """

    def __init__(
        self,
        store: Store | Inlet,
        engine: Engine,
        *,
        verify: Verify = "changed",
        observe: Observe | None = None,
        trace: Trace | None = None,
        layout: str = AUTO,
        transport: Literal["auto"] | None = None,
    ) -> None:
        if layout not in CHOICES:
            raise ConfigError(f"layout: expected one of {', '.join(CHOICES)}, found {layout!r}")
        if verify not in ("changed", "full"):
            raise ConfigError(f"verify: expected 'changed' or 'full', found {verify!r}")
        check_kind("engine", engine, Engine)
        self._inlet = store if isinstance(store, Inlet) else None
        if not isinstance(store, Inlet):
            check_kind("store", store, Store)
            self._store = store
        if transport is not None and (transport != "auto" or isinstance(store, Inlet)):
            raise ConfigError(
                f"transport: expected 'auto' beside a store, or None, found {transport!r}"
            )
        self._doorway = None if transport is None or isinstance(store, Inlet) else Doorway(store)
        self._engine = engine
        self._verify = verify
        self._observe = observe if observe is not None else ignore
        self._trace = trace
        self._layout = layout
        self._follower: Follower | None = None

    def sync(self, version: int | str | None = None, *, repair: bool = False) -> AppliedVersion:
        """Bring the engine to `version`, by default the current one; do nothing if it is there.

        On a live path: wait for the next version that the publisher sends, up to the inlet's `timeout_s`, and
        return when it is committed on this engine; all engines commit, or none.

        Args:
            version: number of the version; in a foreign layout its identity.
            repair: believe nothing of what the engine says that it holds: start from a full version
                and put right whatever differs. Cost: one full version fetched, every weight read.

        An engine that holds weights without knowing their version is fingerprinted once: if a version
        of the run has exactly these weights, nothing of it is fetched.

        Raises:
            BaseVersionError: the run has no such version, or the engine follows another run.
            VerifyError, FormatError, CodecError: what the store holds is damaged, or (VerifyError) the
                engine's bits are not those of the version it holds; says what and where.
            LayoutError: the engine's names, dtypes or shapes are not the run's.
            TornUpdateError: an update failed and could not be undone.
            TransportTimeoutError, PeerLostError: (live) no version came in time, or the trainer died.
            CommitError: (live) another engine could not take the version; says which, and why.
        After any of them but the last the engine holds the last version it committed, which may be
        one on the way.
        """
        inlet = self._inlet if self._doorway is None else self._doorway.inlet()
        if inlet is not None:
            return self._taken(inlet, version, repair=repair)
        follower = self._foreign()
        if follower is not None:
            return follower.sync(version, repair=repair)
        phases = Phases(self._trace)
        with phases("plan"):
            at = None if repair else self._engine.held()
        with EarlyPart(self._store, at) as early:
            return self._pulled(early, phases, at, version, repair=repair)

    def _pulled(
        self,
        early: EarlyPart,
        phases: Phases,
        at: HeldVersion | None,
        version: int | str | None,
        *,
        repair: bool,
    ) -> AppliedVersion:
        store = MeteredStore(early, phases)
        with phases("plan"):
            history = History.open(store, at)
            self._layout = interchange.SYNCLINE
            target = history.target(number_of(version))
        with phases("verify"):
            held = None if repair else self._held(at, history)
        with phases("plan"):
            path = history.path(held, target)
        early.keep_for(path[0].manifest if path else None)
        total_bytes = sum(at.manifest.payload_bytes for at in path)
        self._observe(Step("pull.planned", 0, total_bytes))
        pull = Pull(store, self._engine, phases, self._observe, total_bytes)
        for step in path:
            pull.step(held, step)
            held = step
            self._observe(Step("pull.version_applied", pull.done_bytes, total_bytes))
        if self._verify == "full":
            with phases("verify"):
                verify_engine(self._engine, target.manifest)
        kind: Kind = "full" if any(at.manifest.kind == "full" for at in path) else "delta"
        seconds = phases.seconds()
        return AppliedVersion(
            run_id=history.head.run_id,
            version=target.version,
            manifest_sha256=target.sha256,
            fingerprint=target.manifest.fingerprint.hex(),
            applied=tuple(pull.applied),
            changed=pull.changed,
            payload_bytes=pull.done_bytes,
            seconds=seconds,
            moved=Moved.of(
                "store", kind, 1, store.wire_bytes, target.manifest.model_bytes, seconds
            ),
        )

    def wait(self, timeout_s: float, *, poll_s: float = 1.0) -> None:
        """Wait until the store has a version to sync to: for an engine that starts before its trainer.

        With a `transport`, a publisher that waits on a live path will do, too: `sync` waits for the version.
        A store that cannot be read yet, or holds the beginning of a foreign version, is looked at again.

        Args:
            timeout_s: how long to wait; 0: look once.
            poll_s: how often to look.

        Raises:
            TransportTimeoutError: there was none; names the store and what was found last.
            ConfigError: it is no store but a live path, on which `sync` itself waits.
        """
        if self._inlet is not None:
            raise ConfigError("wait: expected a store, found a live path; its sync waits by itself")
        end = time.monotonic() + check_seconds("timeout_s", timeout_s)
        check_seconds("poll_s", poll_s)
        while True:
            if self._doorway is not None and self._doorway.inlet() is not None:
                return
            found = lacks(self._store, self._layout)
            left_s = end - time.monotonic()
            if found is None:
                return
            if left_s <= 0:
                raise TransportTimeoutError(
                    f"expected a version in {self._store} within {timeout_s} s, found {found}; start the "
                    "publisher, check the path, or wait longer"
                )
            time.sleep(min(poll_s, left_s))

    def close(self) -> None:
        """Leave a live path that was joined by itself; harmless where there is none, or again."""
        if self._doorway is not None:
            self._doorway.close()

    def _taken(self, inlet: Inlet, version: int | str | None, *, repair: bool) -> AppliedVersion:
        if version is not None:
            raise ConfigError(
                f"version: a live path brings what the publisher sends, found {version!r}; take an older "
                "version from the store"
            )
        phases = Phases(self._trace)
        taker = Taker(inlet, self._engine, phases, self._observe, self._verify)
        at = taker.take(repair=repair)
        kind, seconds = taker.kind, phases.seconds()
        model_bytes = at.manifest.model_bytes
        return AppliedVersion(
            run_id=at.manifest.run_id,
            version=at.version,
            manifest_sha256=at.sha256,
            fingerprint=at.manifest.fingerprint.hex(),
            applied=() if kind is None else (at.version,),
            changed=taker.changed,
            payload_bytes=taker.payload_bytes,
            seconds=seconds,
            moved=None
            if kind is None
            else Moved.of(inlet.name, kind, 1, taker.wire_bytes, model_bytes, seconds),
        )

    def _foreign(self) -> Follower | None:
        """Return who follows the store if it is not in our own layout; a layout is found out once."""
        if self._follower is None:
            layout = foreign_layout(self._store, self._layout)
            if layout is None:
                return None
            self._follower = Follower(
                self._store,
                layout,
                self._engine,
                verify=self._verify,
                observe=self._observe,
                trace=self._trace,
            )
        return self._follower

    def _held(self, held: HeldVersion | None, history: History) -> HeldVersion | None:
        if held is None:
            return adopt(self._engine, history)
        if held.manifest.run_id != history.head.run_id:
            raise BaseVersionError(
                f"the engine follows run {held.manifest.run_id} at version {held.version}, the store "
                f"is run {history.head.run_id}; use that run's store or a fresh engine, or move this one over with "
                "sync(repair=True), on disk syncline pull --repair, which starts from a full version",
                version=held.version,
            )
        return held
