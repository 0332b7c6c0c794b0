"""A version from all ranks of a trainer to the engines that joined: the leader talks, every rank sends.

The leader alone offers, collects votes and decides, as a trainer of one rank does. For every round it tells the
others what goes to whom; each runs its lane and says how that ended. At the end all hear what became of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from syncline.abc import Observe, Outlet
from syncline.errors import PeerLostError, SynclineError
from syncline.format import cargo as cargo_format
from syncline.format import strict_json
from syncline.format.bucket import Bucket, Cargo
from syncline.sync.accounting import Moved
from syncline.sync.live.goods import Sent, payload_metas
from syncline.sync.phases import Phases
from syncline.sync.reports import Delivery
from syncline.sync.sharded.lane import ENDED, ORDER, Lane, planned
from syncline.sync.sharded.ranks import LEADER, Ranks
from syncline.types import Step, TensorMeta
from syncline.version import Kind

_LENGTH_BYTES = 8
_LIMIT_BYTES = 1 << 24
_ROUND, _OVER = "round", "over"
_KEYS: Mapping[str, tuple[str, ...]] = {
    _ROUND: ("order", "members", "timeout_ms"),
    _OVER: ("order", "version", "committed", "missed", "error"),
}
_PATIENCE, _LEADERS_PATIENCE = 4, 2


class Leading:
    """The leader's side: the sender whose buckets lie on all ranks; see `Sender`.

    Args:
        lanes: where engines join the other ranks, in their order.
    """

    def __init__(
        self,
        lane: Lane,
        ranks: Ranks,
        lanes: Sequence[str],
        metas: Sequence[TensorMeta],
        owners: Mapping[str, int],
    ) -> None:
        self._lane = lane
        self._ranks = ranks
        self._metas = metas
        self._owners = owners
        self._number = 0
        self.lanes = lanes
        self.payloads: Mapping[str, int] = {}

    def buckets(self, kind: Kind, bucket_bytes: int) -> tuple[tuple[Bucket, ...], Sequence[int]]:
        """Return all buckets; see `Sender.buckets`."""
        metas = self._metas if kind == "full" else payload_metas(self.payloads)
        buckets = planned(metas, self._owners, bucket_bytes)
        return buckets, [self._owners[each.pieces[0].meta.name] for each in buckets]

    def send(
        self,
        outlet: Outlet,
        cargo: Cargo,
        members: Sequence[str],
        timeout_s: float,
        on_opened: Callable[[], None],
        on_sent: Sent,
    ) -> None:
        """Let every rank send what it owns; see `Sender.send`.

        Raises:
            PeerLostError: an engine or a rank is gone, late, or has failed; names it.
        """
        fields = {"members": list(members), "timeout_ms": round(1000 * timeout_s)}
        self._order(_ROUND, fields, cargo_format.dump(cargo))
        faults: list[str] = []
        try:
            self._lane.run(self._number, cargo, members, timeout_s, on_opened, on_sent)
        except SynclineError as error:
            faults.append(str(error))
            self._lane.tell(self._number, str(error))
        except BaseException as error:
            self._lane.tell(self._number, f"the leader failed: {type(error).__name__}: {error}")
            raise
        faults = [*self._missing_and_failed(patience=1 if faults else _LEADERS_PATIENCE), *faults]
        if faults:
            raise PeerLostError("; ".join(dict.fromkeys(faults)))

    def over(self, delivery: Delivery | None, error: BaseException | None = None) -> None:
        """Tell all ranks what became of the version."""
        fields = {
            "version": None if delivery is None else delivery.version,
            "committed": [] if delivery is None else list(delivery.committed),
            "missed": {} if delivery is None else dict(delivery.missed),
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }
        self._order(_OVER, fields)

    def _missing_and_failed(self, *, patience: int) -> Iterable[str]:
        """Hear from every other rank how its round ended; return what went wrong, the missing first."""
        missing, failed = [], []
        deadline_s = time.monotonic() + patience * self._ranks.timeout_s  # they all ran at one time
        for rank in range(1, self._ranks.size):
            try:
                what = "how its round on the live path ended"
                _, body = self._lane.mail.hear(
                    rank, ENDED, self._number, what, deadline_s=deadline_s
                )
            except SynclineError as error:
                missing.append(str(error))
                continue
            if body:
                failed.append(f"rank {rank}: {bytes(body).decode(errors='replace')}")
        return [*missing, *failed]

    def _order(self, order: str, fields: Mapping[str, object], cargo: bytes = b"") -> None:
        self._number += 1
        head = strict_json.dump({"order": order, **fields})
        body = len(head).to_bytes(_LENGTH_BYTES, "little") + head + cargo
        for rank in range(1, self._ranks.size):
            with suppress(PeerLostError):  # found out when it is to say how its round ended
                self._lane.mail.send(rank, ORDER, self._number, body)


class Following:
    """The side of every other rank."""

    def __init__(self, lane: Lane, ranks: Ranks, outlet: Outlet, observe: Observe) -> None:
        self._lane = lane
        self._ranks = ranks
        self._outlet = outlet
        self._observe = observe
        self._number = 0

    def follow(self, phases: Phases, model_bytes: int) -> Delivery:
        """Do what the leader says, until it says what became of the version.

        Raises:
            PeerLostError, TransportTimeoutError: the leader is gone, or failed; the version is in the store.
        """
        sent_bytes, kind, engines = 0, "full", 1

        def on_sent(each: Bucket) -> None:
            nonlocal sent_bytes
            if self._lane.is_mine(each):
                sent_bytes += each.nbytes * engines
                self._observe(Step("deliver.bucket_sent", sent_bytes))

        while True:
            fields, raw = self._heard()
            if fields["order"] == _OVER:
                break
            cargo = cargo_format.load(raw, "the leader's order")
            members = [str(name) for name in fields.items("members")]
            kind, engines = cargo.kind, len(members)
            with phases("wire"):
                self._round(cargo, members, fields.integer("timeout_ms", minimum=1) / 1000, on_sent)
        if fields["error"] is not None:
            raise PeerLostError(
                f"rank {LEADER} failed after the version was committed to the store: {fields.text('error')}"
            )
        told = strict_json.members(fields["missed"], "the leader's order")
        moved = Moved.of(
            self._outlet.name,
            "delta" if kind == "delta" else "full",
            engines,
            sent_bytes,
            model_bytes,
            {"wire": phases.seconds().get("wire", 0.0)},
        )
        return Delivery(
            self._outlet.name,
            fields.integer("version"),
            tuple(str(name) for name in fields.items("committed")),
            {name: str(why) for name, why in told.items()},
            moved,
        )

    def _heard(self) -> tuple[strict_json.Fields, bytes]:
        what = "what to do next on the live path"
        deadline_s = time.monotonic() + _PATIENCE * self._ranks.timeout_s
        self._number, told = self._lane.mail.hear(
            LEADER, ORDER, self._number + 1, what, deadline_s=deadline_s
        )
        body = bytes(told)
        where = "the leader's order"
        stop = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
        value = strict_json.members(
            strict_json.parse(body[_LENGTH_BYTES:stop], where, limit_bytes=_LIMIT_BYTES), where
        )
        keys = _KEYS[_OVER] if value.get("order") == _OVER else _KEYS[_ROUND]
        return strict_json.Fields(value, where, keys), body[stop:]

    def _round(self, cargo: Cargo, members: Sequence[str], timeout_s: float, on_sent: Sent) -> None:
        """Run this rank's lane, and tell the leader how that ended."""
        fault = ""

        def on_opened() -> None:
            self._observe(Step("deliver.opened"))

        try:
            self._lane.run(self._number, cargo, members, timeout_s, on_opened, on_sent)
            self._observe(Step("deliver.sent"))
        except SynclineError as error:
            fault = str(error)
            self._lane.leave(members)
        except BaseException as error:
            self._lane.leave(members)
            self._lane.tell(self._number, f"{type(error).__name__}: {error}")
            raise
        if fault:
            self._lane.tell(self._number, fault)
        else:
            self._lane.mail.send(LEADER, ENDED, self._number)
