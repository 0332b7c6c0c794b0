"""Who does what in a sharded publish; it follows from the layout alone, so that all ranks agree unasked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.errors import ConfigError
from syncline.layouts import Layout, once
from syncline.layouts.blocks import Block, Box, Run, run_of
from syncline.layouts.coverage import holders

Copy = tuple[str, int, int]
"""One of several copies of a box: canonical name, number of the box, number of the copy."""


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block of this rank, and what the rank does with it.

    Attributes:
        run: the block on flat memory.
        is_answered: this rank publishes the block's changes; of several holders one does.
        copy: which copy of its box it is; None where there is one alone.
    """

    run: Run
    is_answered: bool
    copy: Copy | None


@dataclass(frozen=True)
class Shares:
    """The part of one rank in a layout.

    Attributes:
        owners: by canonical name, the rank that encodes the tensor and writes it.
        writers: the ranks that own a tensor, ascending; the place in it is the number of the part.
        blocks: what this rank holds, by local name.
        targets: the ranks that this one sends its changes to; itself, if it owns any of them.
        sources: the ranks that send changes to this one; itself, if it holds any of what it owns.
        copies: for every tensor that this rank owns, for each box with several copies, its number and
            who holds them.
        answers: for every tensor that this rank owns, who publishes which of its blocks.
        digest: of what all ranks must agree on.
    """

    owners: Mapping[str, int]
    writers: tuple[int, ...]
    blocks: Mapping[str, tuple[HeldBlock, ...]]
    targets: tuple[int, ...]
    sources: tuple[int, ...]
    copies: Mapping[str, tuple[tuple[int, Box, tuple[int, ...]], ...]]
    answers: Mapping[str, tuple[tuple[int, Block], ...]]
    digest: str


def shares(layout: Layout, rank: int) -> Shares:
    """Return what this rank does.

    Raises:
        ConfigError: the layout has no such rank.

    Cost: O(blocks of all ranks).
    """
    placements = {placement.rank: placement for placement in layout.placements}
    if rank not in placements:
        raise ConfigError(
            f"this is rank {rank}, the layout has ranks {min(placements)} to {max(placements)}: "
            "expected a layout for exactly the ranks that publish"
        )
    held = holders(layout)
    answered = {
        placement.rank: frozenset(map(_key, placement.blocks))
        for placement in once(layout).placements
    }
    owners = _owners(layout, held, answered)
    mine: dict[str, list[HeldBlock]] = {tensor.name: [] for tensor in placements[rank].tensors}
    targets: set[int] = set()
    sources: set[int] = set()
    copies: dict[str, list[tuple[int, Box, tuple[int, ...]]]] = {}
    answers: dict[str, list[tuple[int, Block]]] = {}
    for name, boxes in held.items():
        for number, (box, pairs) in enumerate(boxes.items()):
            if owners[name] == rank:
                answers.setdefault(name, []).extend(
                    (holder, block) for holder, block in pairs if _key(block) in answered[holder]
                )
                sources.update(holder for holder, _ in pairs)
                if len(pairs) > 1:
                    its = (number, box, tuple(holder for holder, _ in pairs))
                    copies.setdefault(name, []).append(its)
            for place, (holder, block) in enumerate(pairs):
                if holder == rank:
                    targets.add(owners[name])
                    copy = (name, number, place) if len(pairs) > 1 else None
                    run = run_of(block, layout.catalog[name].grid)
                    is_answered = _key(block) in answered[rank]
                    mine[block.local].append(HeldBlock(run, is_answered, copy))
    return Shares(
        owners,
        tuple(sorted(set(owners.values()))),
        {name: tuple(blocks) for name, blocks in mine.items()},
        tuple(sorted(targets)),
        tuple(sorted(sources)),
        {name: tuple(its) for name, its in copies.items()},
        {name: tuple(its) for name, its in answers.items()},
        _digest(layout, owners),
    )


def _key(block: Block) -> tuple[str, Box, str, int]:
    return block.name, block.box, block.local, block.offset


def _owners(
    layout: Layout,
    held: Mapping[str, Mapping[Box, Sequence[tuple[int, Block]]]],
    answered: Mapping[int, frozenset[tuple[str, Box, str, int]]],
) -> dict[str, int]:
    """Return for each tensor the rank that encodes it: one that answers for some of it.

    Of several it is the one with the fewest bytes so far, the lowest first.
    """
    load = dict.fromkeys(answered, 0)
    owners: dict[str, int] = {}
    for name, boxes in held.items():
        able = {
            rank
            for pairs in boxes.values()
            for rank, block in pairs
            if _key(block) in answered[rank]
        }
        # Nobody answers for a tensor without elements; the first rank writes that there are none.
        owner = min(able, key=lambda rank: (load[rank], rank)) if able else min(load)
        load[owner] += layout.catalog[name].meta.nbytes
        owners[name] = owner
    return owners


def _digest(layout: Layout, owners: Mapping[str, int]) -> str:
    found = hashlib.sha256(repr(len(layout.placements)).encode())
    for name in sorted(layout.catalog):
        found.update(repr((layout.catalog[name].meta, owners[name])).encode())
    return found.hexdigest()
