"""Rules applied: from a model's tables to local tensors, blocks and the catalog they speak of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from syncline.errors import LayoutError
from syncline.layouts.blocks import Block, CanonicalTensor, LocalTensor
from syncline.layouts.model import Model
from syncline.layouts.rules import Cut, Piece, Rule, arrange, resolve
from syncline.types import TensorMeta

Part = tuple[LocalTensor, list[Block]]
"""One local tensor and its blocks."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a rank stands: among those that cut dense tensors, those that cut experts, which experts.

    Attributes:
        slots: the expert in each of the rank's slots.
        expert_copies: how many slots of the whole layout hold each expert, where that differs.
    """

    dense: Cut
    expert: Cut
    slots: tuple[int, ...] = ()
    expert_copies: Mapping[int, int] | None = None


class Builder:
    """Applies rules, and collects the canonical tensors that they name.

    Args:
        model: the model whose tables are applied.
        metas: canonical tensors that are known, for their dtypes.
        seen: local names of real ranks, which say how names are spelled.
    """

    def __init__(
        self, model: Model, metas: Mapping[str, TensorMeta] | None, seen: Collection[str] = ()
    ) -> None:
        self.model = model
        self.metas = metas
        self.seen = frozenset(seen)
        self.catalog: dict[str, CanonicalTensor] = {}

    def apply(self, rule: Rule, locals_: list[str], prefix: str, cuts: Cuts) -> Iterator[Part]:
        """Yield the local tensors that one rule gives a rank.

        Args:
            locals_: spellings of the local prefix; prefix: the canonical one.
        """
        if not rule.is_expert:
            name = self._spelling(locals_, rule.local)
            pieces = [self._piece(rule, text, prefix) for text in rule.pieces]
            tensor, blocks = self._local(rule, name, pieces, cuts.dense)
            for text in rule.stored:
                if self._is_stored(text, prefix):
                    copy = [self._piece(rule, text, prefix)]
                    _, aliases = self._local(rule, name, copy, cuts.dense)
                    blocks.extend(replace(block, is_alias=True) for block in aliases)
            yield tensor, blocks
            return
        stacked = self._stacked_name(locals_, rule.local)
        if stacked is not None and cuts.slots:
            yield _stacked([self._expert(rule, stacked, prefix, e, cuts) for e in cuts.slots])
        elif stacked is None:
            for slot, expert in enumerate(cuts.slots):
                local = self._spelling(locals_, rule.local.replace("{e}", str(slot)))
                yield self._expert(rule, local, prefix, expert, cuts)

    def compare(self, metas: Mapping[str, TensorMeta]) -> None:
        """Accept canonical tensors that are exactly those of the tables.

        Raises:
            LayoutError: names or shapes differ; lists all of them.
        """
        problems = [f"{name}: only in the checkpoint" for name in metas if name not in self.catalog]
        for name, tensor in self.catalog.items():
            if name not in metas:
                problems.append(f"{name}: not in the checkpoint")
            elif metas[name].shape != tensor.meta.shape:
                ours, theirs = tensor.meta.shape, metas[name].shape
                problems.append(f"{name}: {ours} by the tables, {theirs} in the checkpoint")
        if problems:
            listed = "\n  ".join(problems[:20])
            raise LayoutError(
                f"config and checkpoint do not describe the same model; {len(problems)} "
                f"differences:\n  {listed}"
            )

    def _expert(self, rule: Rule, local: str, prefix: str, expert: int, cuts: Cuts) -> Part:
        pieces = [self._piece(rule, text, prefix, expert) for text in rule.pieces]
        cut = cuts.expert
        if cuts.expert_copies is not None:
            cut = replace(cut, copies=cut.copies * cuts.expert_copies[expert])
        return self._local(rule, local, pieces, cut)

    def _piece(self, rule: Rule, texts: str, prefix: str, expert: int = 0) -> Piece:
        """Return a piece in the spelling that the known checkpoint has, else the first.

        Raises:
            LayoutError: the checkpoint's shape fits several spellings, as a square matrix fits its transpose.
        """
        pieces = [
            resolve(text, self.model.dims, prefix, expert, self.model.canonical)
            for text in texts.split(" | ")
        ]
        fits = [piece for piece in pieces if self._is_known(piece)]
        if len(fits) > 1:
            raise LayoutError(
                f"{fits[0].name}: its shape {fits[0].shape} fits {len(fits)} ways in which checkpoints of "
                f"this family lay it out ({texts}); give a `family` whose table has only the right one",
                tensor=fits[0].name,
            )
        piece = fits[0] if fits else pieces[0]
        if piece.name not in self.catalog:
            known = self.metas.get(piece.name) if self.metas else None
            dtype = known.dtype if known else rule.dtype or self.model.dtype
            meta = TensorMeta(piece.name, dtype, piece.shape)
            self.catalog[piece.name] = CanonicalTensor(meta, piece.grid)
        elif self.catalog[piece.name].grid != piece.grid:
            raise LayoutError(
                f"{piece.name}: rules split it as {piece.grid} and {self.catalog[piece.name].grid}",
                tensor=piece.name,
            )
        return piece

    def _is_stored(self, text: str, prefix: str) -> bool:
        """Say whether the checkpoint, where one is known, stores a copy."""
        name = resolve(text, self.model.dims, prefix, 0, self.model.canonical).name
        return self.metas is None or name in self.metas

    def _is_known(self, piece: Piece) -> bool:
        known = self.metas.get(piece.name) if self.metas else None
        return known is not None and known.shape == piece.shape

    def _stacked_name(self, prefixes: list[str], local: str) -> str | None:
        """Return the name of one tensor for all experts, if that is how they are held."""
        names = [name for name in local.split("|") if "{e}" not in name]
        if "{e}" not in local:
            return self._spelling(prefixes, local)
        found = (a + b for a, b in product(prefixes, names))
        return next((name for name in found if name in self.seen), None)

    def _spelling(self, prefixes: list[str], local: str) -> str:
        if not self.seen:
            return prefixes[0] + local.partition("|")[0]
        spellings = [a + b for a, b in product(prefixes, local.split("|"))]
        return next((name for name in spellings if name in self.seen), spellings[0])

    def _local(self, rule: Rule, name: str, pieces: list[Piece], cut: Cut) -> Part:
        if rule.kind == "replicated":
            cut = replace(cut, copies=cut.copies * cut.ways)
        shape, blocks, padding = arrange(rule.kind, pieces, cut, name)
        if rule.add:
            blocks = [replace(block, add=rule.add) for block in blocks]
        dtype = self.catalog[pieces[0].name].meta.dtype
        return LocalTensor(name, dtype, shape, padding), blocks


def _stacked(parts: list[Part]) -> Part:
    """Return tensors of one shape as one tensor with a first axis more."""
    tensor = parts[0][0]
    size = prod(tensor.shape)
    blocks = [
        replace(block, offset=block.offset + slot * size)
        for slot, (_, its_blocks) in enumerate(parts)
        for block in its_blocks
    ]
    padding = sum(part.padding for part, _ in parts)
    return replace(tensor, shape=(len(parts), *tensor.shape), padding=padding), blocks


def collect(parts: Iterable[Part]) -> tuple[tuple[LocalTensor, ...], tuple[Block, ...]]:
    """Return the tensors and the blocks of one rank."""
    tensors: list[LocalTensor] = []
    blocks: list[Block] = []
    for tensor, its_blocks in parts:
        tensors.append(tensor)
        blocks.extend(its_blocks)
    return tuple(tensors), tuple(blocks)
