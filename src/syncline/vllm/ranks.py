"""The workers of one engine agree: what one of them says reaches all, or all of them fail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from syncline.errors import PeerLostError, TransportTimeoutError
from syncline.format import strict_json

_MESSAGE_BYTES = 16384
_TEXT_LENGTH = 2000  # six bytes each at worst, and there is one long text in a message

Said = Mapping[str, Any]


class Workers(Protocol):
    """The workers that hold one model between them.

    Attributes:
        rank, count: which of them this is.
    """

    rank: int
    count: int

    def gather(self, said: Said, timeout_s: float) -> list[Said]:
        """Return what every worker said, by rank. Collective: yes.

        Raises:
            TransportTimeoutError: another worker did not come in time.
            PeerLostError: another worker has died.
        """


class OneWorker:
    """The only worker of an engine."""

    rank = 0
    count = 1

    def gather(self, said: Said, timeout_s: float) -> list[Said]:
        """Return what it said itself."""
        return [said]


class GroupWorkers:
    """The members of a `torch.distributed` group of processes on the host's side (Gloo).

    Args:
        group: a process group with a CPU backend.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist  # noqa: PLC0415 - whoever has a group has torch

        self._group = group
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)

    def gather(self, said: Said, timeout_s: float) -> list[Said]:
        """Exchange one message of fixed size; see `Workers.gather`."""
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        raw = _encoded(said)
        mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        all_of_them = [torch.empty_like(mine) for _ in range(self.count)]
        try:
            work = dist.all_gather(all_of_them, mine, group=self._group, async_op=True)
            work.wait(timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            text = str(error)
            if "imed out" in text or "imeout" in text:
                raise TransportTimeoutError(
                    f"worker {self.rank}: another worker of this engine did not answer in {timeout_s:.3g} s"
                ) from error
            raise PeerLostError(
                f"worker {self.rank}: another worker of this engine is gone: {text:.200}"
            ) from error
        return [
            strict_json.members(_parsed(bytes(one.numpy())), f"worker {rank}")
            for rank, one in enumerate(all_of_them)
        ]


def _encoded(said: Said) -> bytes:
    """Return what is said as JSON that fits the message; long texts are cut."""
    cut = {
        key: value[:_TEXT_LENGTH] if isinstance(value, str) else value
        for key, value in said.items()
    }
    return json.dumps(cut).encode()


def _parsed(raw: bytes) -> object:
    text = raw.rstrip(b"\0")
    return strict_json.parse(text, "a worker's message", limit_bytes=_MESSAGE_BYTES)
