"""The weight-transfer engine `syncline`: vLLM's own lifecycle, with workers that pull from a store.

Imported by vLLM alone, through `plugin`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from syncline.errors import ConfigError
from syncline.vllm import versions
from syncline.vllm.extension import SynclineWorker, new_session

PHASES = ("stage", "apply", "undo")
_LIFECYCLE = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
_MARK = "_syncline_last_reports"
_log = logging.getLogger(__name__)


@dataclass
class SynclineInitInfo(WeightTransferInitInfo):
    """What `init_weight_transfer_engine` is told.

    Attributes:
        store: path or URL of the run to follow.
    """

    store: str


@dataclass
class SynclineUpdateInfo(WeightTransferUpdateInfo):
    """What `update_weights` is told.

    Attributes:
        version: number of the version; None: the store's current one, which workers may see differently.
        store: follow this one from now on.
        phase: `stage` returns at once and works beside generation, `apply` writes what is staged, `undo` takes
            it back; None: stage and apply in one call, during which nothing is generated.
        repair: start from a full version, and believe nothing that the workers say they hold.
    """

    version: int | None = None
    store: str | None = None
    phase: str | None = None
    repair: bool = False


class SynclineWeightTransferEngine(WeightTransferEngine[SynclineInitInfo, SynclineUpdateInfo]):
    """Brings a worker to the versions of a store; see `syncline.vllm.session`.

    With `--additional-config '{"syncline": {"store": "..."}}'` it catches up with the store's current version
    while the worker starts, before anything is served.
    """

    init_info_cls = SynclineInitInfo
    update_info_cls = SynclineUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        versions.check_installed()
        super().__init__(config, vllm_config, device, model)
        self.session = new_session(model, vllm_config)
        _equip(_worker_class(vllm_config))
        store = _store_at_start(vllm_config)
        if store is not None:
            self.session.together(lambda: self._catch_up(store))
            self.session.apply()
            self.session.finish()

    def init_transfer_engine(self, init_info: SynclineInitInfo) -> None:
        """Follow this store from now on."""
        self.session.together(lambda: self.session.open(init_info.store))

    def start_weight_update(self) -> None:
        """Do nothing: staging comes with the first `update_weights`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take one phase of an update, on all workers or on none."""
        # Not the base's: that waits for an accelerator, which a CPU has not.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SynclineUpdateInfo) -> None:
        """See `SynclineUpdateInfo`.

        Raises:
            SynclineError: it failed on some worker; all of them hold their old bits.
        """
        phase = update_info.phase
        if phase in (None, "stage"):
            self.session.together(lambda: self._stage(update_info))
        if phase is None:
            self.session.together(self._wait_staged)
        if phase in (None, "apply"):
            self.session.apply()
        elif phase == "undo":
            self.session.undo()
        elif phase != "stage":
            raise ConfigError(
                f"phase: expected one of {', '.join(PHASES)} or none, found {phase!r}"
            )

    def finish_weight_update(self) -> None:
        """Make what was applied the version that is held."""
        self.session.finish()

    def shutdown(self) -> None:
        """Do nothing: a store is not connected to."""

    def _stage(self, info: SynclineUpdateInfo) -> None:
        if info.store is not None:
            self.session.open(info.store)
        self.session.stage(info.version, repair=info.repair)

    def _wait_staged(self) -> None:
        self.session.wait_staged()

    def _catch_up(self, store: str) -> None:
        self.session.open(store)
        self.session.stage(None)
        self.session.wait_staged()


def _store_at_start(vllm_config: Any) -> str | None:
    """Return the store of `--additional-config`, if it has one.

    Raises:
        ConfigError: the member `syncline` is not legal.
    """
    given = getattr(vllm_config, "additional_config", None)
    ours = given.get("syncline") if isinstance(given, dict) else None
    if ours is None:
        return None
    if not isinstance(ours, dict) or set(ours) != {"store"} or not isinstance(ours["store"], str):
        raise ConfigError(
            f'additional_config: expected {{"syncline": {{"store": PATH OR URL}}}}, found {ours!r:.200}'
        )
    return ours["store"]


def _worker_class(vllm_config: Any) -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: PLC0415

    found = resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
    if not isinstance(found, type):
        raise ConfigError(f"worker_cls: expected a class, found {found!r:.80}")
    return found


def _equip(worker: type) -> None:
    """Give the workers the methods of the extension, and let the last of them report what all failed at.

    vLLM 0.32 reads the answers of a call worker by worker and stops at the first failure
    (`v1/executor/multiproc_executor.py`, `get_response`): the answers behind it stay in their queues, and every
    later call takes an older one for its own. All workers agree on a failure, so it is enough that the
    last one, whose answer is read last, reports it.
    """
    if not issubclass(worker, SynclineWorker):
        worker.__bases__ = (*worker.__bases__, SynclineWorker)
    for name in _LIFECYCLE:
        method = getattr(worker, name)
        if not hasattr(method, _MARK):
            setattr(worker, name, _last_reports(method))


def _last_reports(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(worker: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(worker, *args, **kwargs)
        except Exception as error:
            if worker.rank == worker.parallel_config.world_size - 1:
                raise
            _log.error("syncline: %s: %s (the last worker reports it)", method.__name__, error)
            return None

    setattr(call, _MARK, True)
    return call
