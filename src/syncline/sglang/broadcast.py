"""Whole tensors over a process group that the server's ranks join: SGLang's `update_weights_from_distributed`.

The server answers a request when its broadcast is over. So each request is made on a thread of its own while
this process broadcasts, and a request that is refused ends the broadcast: nobody else would come to it.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self

from syncline.arrays import torch_module
from syncline.errors import (
    ConfigError,
    SynclineError,
    TransportTimeoutError,
    TransportUnavailableError,
)
from syncline.sglang.buckets import FORMAT, Bucket, Tensors, filled, torch_dtype
from syncline.sglang.control import SglangHttp

Backend = Literal["gloo", "nccl"]

_LOOK_S = 0.01
_SETTLE_S = 10.0
"""How long a broadcast may take after the server said that it has ended."""


class Group:
    """A process group of this process, its rank 0, and all ranks of one server.

    Args:
        control: the server.
        ranks: how many it has.
        backend: `gloo`, through host memory; or `nccl`, from this process's current GPU, which was never run.
        host: an address of this machine that the server can reach.
        timeout_s: longest that joining, and any one broadcast, may take.

    Raises:
        ConfigError: `host` is no address of this machine.
        TransportUnavailableError: NCCL, and there is no GPU.
        TransportTimeoutError: the ranks did not come.
        EndpointError: the server refused.

    Attributes:
        is_broken: a broadcast failed, and may still wait for ranks that never come: the next one needs a group
            of its own.
    """

    is_broken = False

    def __init__(
        self,
        control: SglangHttp,
        ranks: int,
        *,
        backend: Backend = "gloo",
        host: str = "127.0.0.1",
        timeout_s: float = 120.0,
    ) -> None:
        self._device = _device(backend)
        self._control = control
        self._timeout_s = timeout_s
        self.name = f"syncline-{uuid.uuid4().hex}"
        self._dist: Any = import_module("torch.distributed")
        self._work: Any = None
        patience = timedelta(seconds=timeout_s)
        port = _free_port(host)
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": ranks + 1,
            "group_name": self.name,
            "backend": backend,
        }
        call = _Call(lambda: control.join_group(body, timeout_s))
        try:
            self._store = self._dist.TCPStore(
                host, port, ranks + 1, is_master=True, timeout=patience, wait_for_workers=False
            )
            store = self._store
            # As SGLang nests them: its own prefix, torch's for the group, torch's for the device.
            for prefix in (self.name, f"{self.name}/", f"{self._device}/"):
                store = self._dist.PrefixStore(prefix, store)
            kind = self._dist.ProcessGroupGloo if backend == "gloo" else self._dist.ProcessGroupNCCL
            self._group: Any = kind(store, 0, ranks + 1, patience)
        except RuntimeError as error:
            call.finish()  # its reason is the better one
            raise TransportTimeoutError(f"the server's ranks did not join: {error}") from error
        call.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the server's ranks leave; harmless when it is gone."""
        with suppress(SynclineError):
            self._control.leave_group(self.name, self._timeout_s)
        if self._work is not None and not self._work.is_completed():
            # Freed now, it would stop this process until its time is up: it ends when the ranks have left.
            threading.Thread(target=_outlive, args=(self._group, self._work), daemon=True).start()
        self._group = self._work = None

    def broadcast(self, flat: Any, body: Mapping[str, Any], timeout_s: float) -> None:
        """Send one tensor to all ranks, which do with it what `body` says.

        Raises:
            EndpointError: the server refused, or could not load it.
            TransportTimeoutError: it did not come to the broadcast.
        """
        try:
            self._broadcast(flat, body, timeout_s)
        except BaseException:
            self.is_broken = True
            raise

    def _broadcast(self, flat: Any, body: Mapping[str, Any], timeout_s: float) -> None:
        call = _Call(lambda: self._control.receive_tensors(body, timeout_s))
        options = self._dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        sent = flat.to(self._device)
        self._work = work = self._group.broadcast([sent], options)
        while not work.is_completed() and not call.is_over():
            call.wait(_LOOK_S)
        call.finish()
        until_s = time.monotonic() + _SETTLE_S
        while not work.is_completed():
            if time.monotonic() > until_s:
                raise TransportTimeoutError(
                    "the server answers that it received the broadcast, and never came to it"
                )
            time.sleep(_LOOK_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise TransportTimeoutError(f"the broadcast did not end: {error}") from error


def _outlive(*pending: Any) -> None:
    """Keep a group until its last broadcast has ended, by its own time-out at the latest."""
    _, work = pending
    while not work.is_completed():
        time.sleep(_LOOK_S)


class FromBroadcast:
    """Tensors that the server's ranks receive over a group; see `change.Change`.

    Args: as `buckets.FromMemory`, and `joined`: returns a group in which nothing has failed.
    """

    name = "from distributed"
    in_session = True
    trial: Path | None = None

    def __init__(
        self,
        joined: Callable[[], Group],
        buckets: Sequence[Bucket],
        new: Tensors,
        old: Tensors,
        *,
        shows: bool,
    ) -> None:
        self._joined = joined
        self._buckets = buckets
        self._new = new
        self._old = old
        self.shows = shows
        self.has_begun = False
        self._begun: list[Bucket] = []

    def send(self, control: SglangHttp, timeout_s: float) -> None:
        """Broadcast every bucket; see `Change.send`."""
        group = self._joined()
        for bucket in self._buckets:
            flat = filled(bucket, self._new)
            self.has_begun = True
            self._begun.append(bucket)
            _send(group, bucket, flat, timeout_s)

    def check(self) -> None:
        """See `Change.check`: every bucket was proved where it lay when it was sent."""

    def undo(self, control: SglangHttp, timeout_s: float) -> None:
        """Broadcast every bucket as it was, of those that may have arrived; see `Change.undo`."""
        if not self._begun:
            return
        group = self._joined()
        for bucket in self._begun:
            _send(group, bucket, filled(bucket, self._old), timeout_s)


def _send(group: Group, bucket: Bucket, flat: Any, timeout_s: float) -> None:
    body = {
        "names": [meta.name for meta in bucket.metas],
        "dtypes": [str(torch_dtype(meta)).removeprefix("torch.") for meta in bucket.metas],
        "shapes": [list(meta.shape) for meta in bucket.metas],
        "group_name": group.name,
        "load_format": FORMAT,
    }
    group.broadcast(flat, body, timeout_s)


class _Call:
    """A request on a thread of its own; `finish` returns when it is over, or raises what it raised."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._do = do
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._do()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def _device(backend: Backend) -> str:
    """Return where what is broadcast must lie."""
    if backend == "gloo":
        return "cpu"
    if not torch_module().cuda.is_available():
        raise TransportUnavailableError(
            "route 'nccl' sends from a GPU of this process, found none; use the route 'distributed', over Gloo"
        )
    return "cuda"


def _free_port(host: str) -> int:
    try:
        with socket.socket() as free:
            free.bind((host, 0))
            return int(free.getsockname()[1])
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host {host!r}: expected a name or IPv4 address of this machine that the server reaches, found none "
            f"({error})"
        ) from error
