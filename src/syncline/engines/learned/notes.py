"""What is known of a loader that runs: the copies that it makes, and which tensors it loses."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from syncline.engines.learned.followed import Followed
from syncline.engines.learned.memories import Memories, Memory
from syncline.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Region:
    """A copy that the loader made: elements of a checkpoint tensor to units of a live memory.

    Element `offset + sum(i[k] * strides[k])` of the checkpoint tensor `name` goes to unit
    `place + sum(i[k] * steps[k])` of the memory `local`.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    local: str
    place: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Overwritten:
    """Units of a memory, from `first` to `last`, that got something else than copies, and what wrote them."""

    local: str
    first: int
    last: int
    by: str


@dataclass(frozen=True, slots=True)
class Recording:
    """What a loader did with every tensor of a checkpoint.

    Attributes:
        regions: the copies, in order.
        reasons: by name of a tensor whose copies say nothing: why.
        overwritten: what else the loader did to live memory.
    """

    regions: tuple[Region, ...]
    reasons: Mapping[str, str]
    overwritten: tuple[Overwritten, ...]


class Notes:
    """What is known so far; written from any thread.

    Attributes:
        refused: names of the tensors whose operation just raised.
    """

    def __init__(self, memories: Memories) -> None:
        self.memories = memories
        self.regions: list[Region] = []
        self.reasons: dict[str, str] = {}
        self.overwritten: list[Overwritten] = []
        self.refused: tuple[str, ...] = ()
        self._lock = threading.Lock()

    def lose(self, names: Iterable[str], reason: str) -> None:
        """Note why tensors cannot be mapped; the first reason stays."""
        with self._lock:
            for name in names:
                self.reasons.setdefault(name, reason)

    def overwrite(self, target: Any, by: str) -> bool:
        """Note that live memory would get something that is no copy; return whether it is live."""
        memory = self.memories.of(target)
        if memory is None or not target.numel():
            return memory is not None
        first = int(target.storage_offset())
        sides = zip(target.shape, target.stride(), strict=True)
        last = first + sum((side - 1) * step for side, step in sides)
        scale = target.element_size() / memory.unit_bytes
        with self._lock:
            self.overwritten.append(
                Overwritten(memory.name, int(first * scale), int((last + 1) * scale), by)
            )
        return True

    def copy(
        self, target: Any, names: tuple[str, ...], content: Followed | str, dtype: torch.dtype
    ) -> None:
        """Note a copy of a followed tensor into memory; see `Tracked` for what it is."""
        if not target.numel():
            return
        memory = self.memories.of(target)
        if memory is None:
            self.lose(names, "its loader copies it to memory that is not the model's")
            return
        if isinstance(content, str):
            self.lose(names, content)
            return
        if target.dtype != dtype:
            self.lose(names, f"its loader converts {dtype} to {target.dtype}")
            return
        if target.element_size() != memory.unit_bytes:
            self.lose(names, "its memory is shared by tensors of several widths")
            return
        try:
            expanded = content.expanded(tuple(target.shape))
        except LayoutError as error:
            self.lose(names, str(error))
            return
        found = [_region(piece, target, memory) for piece in expanded.pieces]
        with self._lock:
            self.regions.extend(found)

    def recording(self) -> Recording:
        """Return what was noted."""
        return Recording(tuple(self.regions), dict(self.reasons), tuple(self.overwritten))


def _region(piece: Any, target: Any, memory: Memory) -> Region:
    steps = target.stride()
    place = target.storage_offset() + sum(
        a * step for a, step in zip(piece.start, steps, strict=True)
    )
    return Region(
        piece.name, piece.shape, piece.offset, piece.strides, memory.name, place, tuple(steps)
    )
