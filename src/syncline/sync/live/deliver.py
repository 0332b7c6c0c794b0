"""The trainer's side of a live path: offer a version, move its buckets, and let all engines commit or none."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from syncline.abc import Channel, Observe, Outlet
from syncline.choice import against
from syncline.errors import ConfigError, PeerLostError, SynclineError, TransportError
from syncline.format import cargo as cargo_format
from syncline.format import digest
from syncline.format.bucket import Bucket
from syncline.sync.accounting import Moved
from syncline.sync.live import messages
from syncline.sync.live.goods import Goods
from syncline.sync.phases import Phases
from syncline.sync.reports import Delivery
from syncline.types import Step
from syncline.version import Kind

STEPS = (
    "deliver.offered",
    "deliver.answered",
    "deliver.ready",
    "deliver.opened",
    "deliver.bucket_sent",
    "deliver.sent",
    "deliver.voted",
    "deliver.decided",
    "deliver.done",
)

_STORE_PHASES = ("put", "fetch", "commit")
_KINDS: tuple[Kind, ...] = ("delta", "full")


class Courier:
    """Delivers versions over one live path.

    Args:
        kind: `auto`: a delta to who holds its base, else full; or only one of them.
        bucket_bytes: longest bucket; None: what suits the transport.
        timeout_s: the longest that the trainer waits for an engine to answer, to release a bucket, or to
            decode and commit what came.

    Raises:
        ConfigError: the transport does not carry this kind; says why.
    """

    def __init__(
        self,
        outlet: Outlet,
        *,
        kind: str,
        bucket_bytes: int | None,
        timeout_s: float,
        observe: Observe,
    ) -> None:
        if kind != "auto" and kind not in outlet.kinds:
            reason = "the transport does not carry it"
            if kind == "delta":
                reason = against(outlet.name, "delta") or reason
            raise ConfigError(f"live_kind: {kind!r} over {outlet.name}: {reason}")
        self._outlet = outlet
        self._kinds = [name for name in _KINDS if name in outlet.kinds and kind in ("auto", name)]
        self._bucket_bytes = outlet.bucket_bytes if bucket_bytes is None else bucket_bytes
        self._timeout_s = timeout_s
        self._observe = observe
        self._generation = 0

    @property
    def takes_deltas(self) -> bool:
        """Whether payloads may travel, so that they should be kept."""
        return "delta" in self._kinds

    def deliver(self, goods: Goods, phases: Phases) -> Delivery:
        """Bring every engine that joined to the version, or none; say who does not hold it.

        Whoever is gone or silent is left out and named, and the others are served again without it. An
        engine that refuses what it got keeps all from committing. Nothing here raises for the sake of an
        engine.

        Ends within a few `timeout_s` for each engine that is lost on the way.
        """
        lost: dict[str, str] = {}
        committed: list[str] = []
        served: set[str] = set()
        wire_bytes = 0
        members = list(self._outlet.members())
        while True:
            attempt = _Attempt(self._outlet, self._generation, self._timeout_s, self._observe)
            self._generation += 1
            try:
                is_over = attempt.run(goods, members, self._kinds, self._bucket_bytes, phases)
            except BaseException as error:
                attempt.give_up(error)
                self._outlet.reset()
                raise
            if attempt.lost or attempt.refused:
                self._outlet.reset()
            lost |= attempt.lost
            committed += attempt.committed
            served.update(attempt.served)
            wire_bytes += attempt.wire_bytes
            members = [name for name in members if name not in lost and name not in committed]
            if is_over or not members:
                break
        moved = Moved.of(
            self._outlet.name,
            "delta" if attempt.kinds == {"delta"} else "full",
            max(1, len(served)),
            wire_bytes,
            goods.held.manifest.model_bytes,
            {name: spent for name, spent in phases.seconds().items() if name not in _STORE_PHASES},
        )
        return Delivery(
            transport=self._outlet.name,
            version=goods.held.version,
            committed=tuple(committed),
            missed={**lost, **attempt.refused},
            moved=moved,
        )


class _Attempt:
    """One attempt to deliver; its generation tells its messages from those of others."""

    def __init__(self, outlet: Outlet, generation: int, timeout_s: float, observe: Observe) -> None:
        self._outlet = outlet
        self._generation = generation
        self._timeout_s = timeout_s
        self._observe = observe
        self._channels: dict[str, Channel] = {}
        self.lost: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.committed: list[str] = []
        self.served: list[str] = []
        self.kinds: set[Kind] = set()
        self.wire_bytes = 0
        self._decision: Mapping[str, object] | None = None
        self._untold: list[str] = []

    def run(
        self,
        goods: Goods,
        members: Sequence[str],
        kinds: Sequence[Kind],
        bucket_bytes: int,
        phases: Phases,
    ) -> bool:
        """Make the attempt; return whether it is over, or is to be made again without the lost."""
        here = self._outlet.members()
        self._channels = {name: here[name] for name in members if name in here}
        self.lost |= {name: "it left" for name in members if name not in here}
        with phases("wire"):
            wants = self._offer(goods, kinds)
        groups = {kind: [name for name in wants if wants[name][0] == kind] for kind in _KINDS}
        self.committed = [name for name in wants if wants[name][0] == "nothing"]
        asked = [name for group in groups.values() for name in group]
        if self.refused:
            self._refuse(asked)
            return True
        broke = self._rounds(goods, groups, wants, bucket_bytes, phases)
        if broke is not None:
            self._call_off(asked, broke)
            return bool(self.refused)
        with phases("wire"):
            self._conclude(asked)
        return True

    def _rounds(
        self,
        goods: Goods,
        groups: Mapping[Kind, Sequence[str]],
        wants: Mapping[str, tuple[str, bool]],
        bucket_bytes: int,
        phases: Phases,
    ) -> str | None:
        """Move the buckets of every kind that is wanted; return what broke, if anything.

        The error itself is let go: with it would stay what its frames hold, open connections among it.
        """
        try:
            for kind, names in groups.items():
                if names:
                    needs_files = any(wants[name][1] for name in names)
                    self._round(goods, kind, names, bucket_bytes, needs_files, phases)
        except TransportError as error:
            return str(error)
        return None

    def give_up(self, error: BaseException) -> None:
        """Let no engine wait for a trainer that fails in the middle: say so, or what was decided by then."""
        if self._decision is None:
            for name in list(self._channels):
                self._say(name, messages.BREAK, {})  # for those that wait for a round to begin
            self._verdict(
                list(self._channels), f"the trainer failed: {type(error).__name__}: {error}"
            )
        else:
            self._pass_on(self._decision)

    def _offer(self, goods: Goods, kinds: Sequence[Kind]) -> dict[str, tuple[str, bool]]:
        """Return by engine what it needs, and whether it needs the files, too."""
        manifest, table = goods.raw
        allowed = [kind for kind in kinds if kind in goods.kinds]
        fields = {
            "sha256": goods.held.sha256,
            "has_table": table is not None,
            "allowed": allowed,
        }
        blobs = [manifest] if table is None else [manifest, table]
        for name in list(self._channels):
            self._say(name, messages.OFFER, fields, blobs)
        self._observe(Step("deliver.offered"))
        wants = {}
        for name, answer in self._hear((messages.ANSWER, messages.VOTE)):
            with self._blaming(name):
                if answer.kind == messages.VOTE:
                    self.refused[name] = answer.fields.text("error")
                    continue
                words = ("nothing", *allowed)
                wants[name] = (
                    answer.fields.word("wants", *words),
                    answer.fields["needs_files"] is True,
                )
        self._observe(Step("deliver.answered"))
        return wants

    def _round(
        self,
        goods: Goods,
        kind: Kind,
        names: Sequence[str],
        bucket_bytes: int,
        needs_files: bool,
        phases: Phases,
    ) -> None:
        cargo, sources = goods.cargo(kind, bucket_bytes, self._generation)
        files = goods.files if needs_files else {}
        fields = {
            "kind": kind,
            "files": [
                {"path": path, "size_bytes": len(raw), "sha256": digest.sha256(raw)}
                for path, raw in sorted(files.items())
            ],
            "lanes": list(goods.sender.lanes),
            # Who cannot join a rank is to say so while this side still listens.
            "join_ms": max(1, round(500 * self._timeout_s)),
            "sources": [
                source
                for source, each in zip(sources, cargo.buckets, strict=True)
                if each.nbytes and goods.sender.lanes
            ],
        }
        blobs = [cargo_format.dump(cargo), *(files[path] for path in sorted(files))]
        names = [name for name in names if name in self._channels]
        with phases("wire"):
            for name in names:
                self._say(name, messages.LOAD, fields, blobs)
            self._hear_ready(names)
            self._observe(Step("deliver.ready"))
            if not cargo.nbytes:
                return
            done_bytes = 0

            def on_sent(each: Bucket) -> None:
                nonlocal done_bytes
                self.wire_bytes += each.nbytes * len(names)
                done_bytes += each.nbytes
                self._observe(Step("deliver.bucket_sent", done_bytes, cargo.nbytes))

            goods.sender.send(
                self._outlet,
                cargo,
                names,
                self._timeout_s,
                lambda: self._observe(Step("deliver.opened")),
                on_sent,
            )
            self._observe(Step("deliver.sent"))
        self.kinds.add(kind)
        self.served += names

    def _hear_ready(self, names: Sequence[str]) -> None:
        """Wait until all have looked at what is to come; raise if one cannot take it, or is lost."""
        for name, answer in self._hear((messages.READY, messages.VOTE), names):
            with self._blaming(name):
                if answer.kind == messages.READY:
                    continue
                error = answer.fields.text("error")
                if answer.fields["is_own"] is True:
                    self.refused[name] = error
                else:  # no fault of the version: the others can have it
                    self._lose(name, error)
        missing = [name for name in names if name in self.lost or name in self.refused]
        if missing:
            raise PeerLostError(f"engines {', '.join(map(repr, missing))} cannot take part")

    def _conclude(self, asked: Collection[str]) -> None:
        """Collect the votes, say what they come to, and hear who has committed."""
        for name, vote in self._hear((messages.VOTE,), asked):
            with self._blaming(name):
                if vote.fields["error"] is not None:
                    self.refused[name] = vote.fields.text("error")
        self._observe(Step("deliver.voted"))
        voters = [name for name in asked if name in self._channels and name not in self.refused]
        if self.refused:
            self._refuse(voters)
            return
        self._verdict(voters, None)
        self._observe(Step("deliver.decided"))
        for name, done in self._hear((messages.DONE,), voters):
            with self._blaming(name):
                if done.fields["error"] is None:
                    self.committed.append(name)
                else:
                    self.refused[name] = done.fields.text("error")
        self._observe(Step("deliver.done"))

    def _refuse(self, names: Collection[str]) -> None:
        """Let nobody commit, since an engine cannot."""
        who = ", ".join(f"engine {name!r}: {why}" for name, why in self.refused.items())
        error = f"not every engine could take the version: {who}"
        self._verdict(names, error)
        self.refused |= dict.fromkeys(names, f"called off: {error}")

    def _call_off(self, asked: Collection[str], error: str) -> None:
        """End a round that broke: tell all, and find out from their votes who is gone or stuck."""
        here = self._outlet.members()
        for name in [name for name in self._channels if name not in here]:
            self._lose(name, "it died or left")
        broken = []
        left = [name for name in asked if name not in self.refused]
        for name in left:
            self._say(name, messages.BREAK, {})
        for name, vote in self._hear((messages.VOTE,), left):
            with self._blaming(name):
                if vote.fields["is_own"] is True:
                    self.refused[name] = vote.fields.text("error")
                else:
                    broken.append(name)
        if self.refused:
            self._refuse(broken)
        else:
            self._verdict(broken, error, is_again=True)
            if not self.lost:
                self.refused = dict.fromkeys(broken, error)

    def _verdict(
        self, names: Collection[str], error: str | None, *, is_again: bool = False
    ) -> None:
        self._untold = list(names)
        self._decision = {"error": error, "again": is_again}
        self._pass_on(self._decision)

    def _pass_on(self, decision: Mapping[str, object]) -> None:
        while self._untold:
            self._say(self._untold[0], messages.VERDICT, decision)
            self._untold.pop(0)

    def _say(
        self,
        name: str,
        kind: str,
        fields: Mapping[str, object],
        blobs: Sequence[bytes] = (),
    ) -> None:
        """Send a message to an engine, or lose the engine."""
        if name in self._channels:
            with self._blaming(name):
                messages.send(
                    self._channels[name],
                    kind,
                    self._generation,
                    fields,
                    blobs,
                    timeout_s=self._timeout_s,
                )
                self.wire_bytes += sum(map(len, blobs))

    def _hear(
        self, kinds: Sequence[str], names: Collection[str] | None = None
    ) -> Iterator[tuple[str, messages.Message]]:
        """Yield the message of every engine, or lose the engine."""
        deadline_s = time.monotonic() + self._timeout_s
        for name in list(self._channels):
            if names is not None and name not in names:
                continue
            found = None
            with self._blaming(name):
                left_s = max(0.0, deadline_s - time.monotonic())
                found = messages.receive(self._channels[name], kinds, self._generation, left_s)
            if found is not None:
                yield name, found

    @contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        """Turn an error of talking to one engine into that engine's being lost."""
        try:
            yield
        except SynclineError as error:
            self._lose(name, str(error))

    def _lose(self, name: str, why: str) -> None:
        self.lost[name] = why
        with suppress(SynclineError):
            self._channels.pop(name).close()
