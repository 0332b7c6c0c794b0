"""How long the leader of a trainer waits for other ranks in a delivery."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from syncline.errors import TransportTimeoutError
from syncline.sync.sharded.convoy import Leading
from syncline.sync.sharded.lane import Mail


class Silent:
    """Ranks of which only the leader says anything; notes until when each was waited for."""

    size, rank, timeout_s = 5, 0, 50.0

    def __init__(self) -> None:
        self.waits: dict[int, Any] = {}

    def receive(self, source: int, what: str, **limit: Any) -> bytes:
        self.waits[source] = limit.get("deadline_s")
        raise TransportTimeoutError(f"rank {source} did not send {what}")


def test_ranks_that_are_silent_are_waited_for_together():
    """Each had a time of its own, one after the other."""
    ranks = Silent()
    lane: Any = SimpleNamespace(mail=Mail(ranks))  # type: ignore[arg-type]
    leading = Leading(lane, ranks, (), (), {})  # type: ignore[arg-type]
    faults = list(leading._missing_and_failed(patience=2))
    assert len(faults) == 4
    assert list(ranks.waits) == [1, 2, 3, 4]
    (deadline_s,) = set(ranks.waits.values())
    assert deadline_s is not None
