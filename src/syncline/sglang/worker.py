"""What runs in every rank of a server: the function for `--custom-weight-loader syncline.sglang.worker.load`.

It reads the order in the staging directory, does it, and leaves an answer there. Nothing of what SGLang
hands over is looked at, and nothing is raised: SGLang would die of it.
"""

from __future__ import annotations

import io
import logging
import shutil
import tempfile
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from syncline import config
from syncline.commit.journal import Journal
from syncline.engines.checkpoint_files import CheckpointFiles
from syncline.errors import TornUpdateError, VerifyError
from syncline.sglang import staged
from syncline.sglang.live import RankWeights
from syncline.sglang.staged import Act, Answer, Order
from syncline.version import PartEntry

_log = logging.getLogger(__name__)
_known: list[tuple[Any, object, RankWeights]] = []
_answered: list[tuple[Any, Answer]] = []
_IN_MEMORY_BYTES = 1 << 26


def load(model: Any, _: object) -> None:
    """Do what the order in the staging directory says; the signature is SGLang's.

    Args:
        model: this rank's module, with live weights.
    """
    try:
        directory = Path(config.sglang_staging())
        obey(model, directory, _rank())
    except Exception:  # noqa: BLE001 - SGLang would die of it
        # The follower finds no answer, and takes that for a failure.
        _log.exception("syncline: no answer could be given")


def obey(model: Any, directory: Path, rank: int) -> Answer:
    """Do the current order on one rank, once however often it is called; leave the answer there, and return it."""
    order = staged.read_order(directory)
    for known, answer in _answered:
        if known is model and (answer.order, answer.rank) == (order.identity, rank):
            staged.write_answer(directory, answer)
            return answer
    try:
        answer = _obey(model, directory, rank, order)
    except Exception as error:  # noqa: BLE001 - the follower is told, and undoes it everywhere
        answer = Answer(
            order.identity,
            rank,
            f"{type(error).__name__}: {error}",
            isinstance(error, TornUpdateError),
            is_strange=isinstance(error, VerifyError),
        )
    _answered[:] = [one for one in _answered if one[0] is not model]
    _answered.append((model, answer))
    staged.write_answer(directory, answer)
    return answer


def _obey(model: Any, directory: Path, rank: int, order: Order) -> Answer:
    weights = _weights(model, Path(order.checkpoint), order.act)
    with ExitStack() as stack:
        journals = [_copied(directory, part, stack) for part in order.journals]
        if order.act == "check":
            return weights.check(order.identity, rank, journals)
        act = weights.apply if order.act == "apply" else weights.undo
        return Answer(order.identity, rank, written=act(journals, order.prints))


def _copied(directory: Path, part: PartEntry, stack: ExitStack) -> Journal:
    """Return a journal, proved in a copy that nobody else can write to."""
    private: IO[bytes] = (
        io.BytesIO() if part.size_bytes <= _IN_MEMORY_BYTES else tempfile.TemporaryFile()  # noqa: SIM115
    )
    stack.enter_context(private)
    with (directory / part.path).open("rb") as file:
        shutil.copyfileobj(file, private)
    return Journal(private, part.path, part)


def _weights(model: Any, checkpoint: Path, act: Act) -> RankWeights:
    """Return what is known of this model; it is found out again when its memory, experts or checkpoint are others."""
    files, experts = CheckpointFiles(checkpoint), _experts()
    for known, places, weights in _known:
        if known is not model:
            continue
        if places == experts and weights.is_of(files.metas()):
            weights.checkpoint = files
            return weights
        if weights.is_applied and act == "undo":
            raise TornUpdateError("the weights were moved in memory before they could be put back")
    weights = RankWeights(model, files)
    _known[:] = [one for one in _known if one[0] is not model]
    _known.append((model, experts, weights))
    return weights


def _experts() -> object:
    """Return which expert SGLang keeps in which place: balancing them moves them within the same memory."""
    try:
        location: Any = import_module("sglang.srt.eplb.expert_location")
    except ImportError:  # not in SGLang
        return None
    metadata = location.get_global_expert_location_metadata()
    return None if metadata is None else metadata.physical_to_logical_map.tolist()


def _rank() -> int:
    """Return this process's rank among those that share a layer."""
    try:
        return int(import_module("sglang.srt.runtime_context").get_parallel().tp_rank)
    except (ImportError, AttributeError):  # before 0.5.21
        return int(import_module("sglang.srt.distributed").get_tensor_model_parallel_rank())
