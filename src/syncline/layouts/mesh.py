"""How Megatron spreads ranks over tensor, expert, data and pipeline groups, and layers over stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank stands in each group."""

    tp: int
    pp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True)
class MegatronMesh:
    """Sizes of Megatron's parallel groups.

    Ranks count tensor parallel fastest, then context and data parallel, pipeline slowest; experts fold
    over the ranks of one stage: expert-tensor fastest, then expert, then expert-data parallel.

    Attributes:
        world: number of ranks.
        tp, cp, pp, vpp: tensor, context, pipeline parallel size; virtual stages (chunks) per rank.
        ep, etp: expert and expert-tensor parallel size; `etp` None means `tp`.
        is_pp_before_dp: pipeline groups count before data parallel ones (`tp-cp-pp-dp`).
        first_layers, last_layers: layers of the first and last stage, where they differ.
        counts_embedding, counts_loss: embedding and loss count as a layer in the even split.
        stages: layers of every chunk, `stages[pp][chunk]`, where none of these rules holds.

    Raises:
        ConfigError: sizes that do not divide.
    """

    world: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    vpp: int = 1
    is_pp_before_dp: bool = False
    first_layers: int | None = None
    last_layers: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False
    stages: tuple[tuple[tuple[int, ...], ...], ...] | None = None

    def __post_init__(self) -> None:
        sizes = (self.world, self.tp, self.pp, self.ep, self.expert_tp, self.cp, self.vpp)
        if min(sizes) < 1:
            raise ConfigError(f"sizes of a mesh are at least 1, found {sizes}")
        for what, size in (
            ("tp * cp * pp", self.tp * self.cp * self.pp),
            ("etp * ep * pp", self.expert_tp * self.ep * self.pp),
        ):
            if self.world % size:
                raise ConfigError(f"{self.world} ranks are not a multiple of {what} = {size}")

    @property
    def expert_tp(self) -> int:
        """Expert-tensor parallel size."""
        return self.tp if self.etp is None else self.etp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a rank stands.

        Example:
            >>> MegatronMesh(4, tp=2, pp=2, ep=2, etp=1).coordinates(1)
            Coordinates(tp=1, pp=0, ep=1, etp=0)
        """
        if self.is_pp_before_dp:
            inner = self.tp * self.cp
            pp = rank // inner % self.pp
            within = rank % inner + rank // (inner * self.pp) * inner
        else:
            pp, within = divmod(rank, self.stage_ranks)
        return Coordinates(
            within % self.tp, pp, within // self.expert_tp % self.ep, within % self.expert_tp
        )

    def layers(self, count: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return which of `count` layers each chunk holds: `[pp][chunk]`, in the chunk's order.

        Raises:
            ConfigError: the layers do not divide among the stages.

        Example:
            >>> MegatronMesh(2, pp=2, vpp=2).layers(4)
            (((0,), (2,)), ((1,), (3,)))
        """
        if self.stages is not None:
            return self._explicit(count)
        before, after = int(self.counts_embedding), int(self.counts_loss)
        slots = [None] * before + list(range(count)) + [None] * after
        held: list[list[tuple[int, ...]]] = [[] for _ in range(self.pp)]
        place = 0
        sizes = self._chunk_sizes(len(slots))
        for _ in range(self.vpp):
            for pp, size in enumerate(sizes):
                chunk = slots[place : place + size]
                held[pp].append(tuple(layer for layer in chunk if layer is not None))
                place += size
        return tuple(tuple(chunks) for chunks in held)

    def _chunk_sizes(self, slots: int) -> list[int]:
        """Return how many slots a chunk of each stage has."""
        fixed = {0: self.first_layers, self.pp - 1: self.last_layers}
        given = {pp: size for pp, size in fixed.items() if size is not None}
        free = [pp for pp in range(self.pp) if pp not in given]
        rest = slots - sum(given.values())
        each, left = divmod(rest, len(free)) if free else (0, rest)
        sizes = [given.get(pp, each) for pp in range(self.pp)]
        if left or rest < 0 or any(size % self.vpp for size in sizes):
            fixed_text = "".join(f", stage {pp} having {size}" for pp, size in given.items())
            raise ConfigError(
                f"{slots} layers (embedding and loss included where they count) do not divide into "
                f"{self.pp} stages of {self.vpp} chunk(s){fixed_text}; say how many layers the first or the "
                "last stage has (first_layers, last_layers; syncline plan: first=, last=), or every stage "
                "(stages; syncline plan: --stages)"
            )
        return [size // self.vpp for size in sizes]

    @staticmethod
    def stages_of(counts: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return `stages` for so many layers in each chunk, `counts[pp][chunk]`.

        Layers run through the first chunk of every stage, then through the second, and so on.

        Raises:
            ConfigError: stages have different numbers of chunks.

        Example:
            >>> MegatronMesh.stages_of([[1, 2], [3, 1]])
            (((0,), (4, 5)), ((1, 2, 3), (6,)))
        """
        chunks = {len(stage) for stage in counts}
        if len(chunks) != 1:
            raise ConfigError(
                f"every stage has as many chunks as every other, found {sorted(chunks)}"
            )
        held: list[list[tuple[int, ...]]] = [[] for _ in counts]
        first = 0
        for chunk in range(chunks.pop()):
            for pp, stage in enumerate(counts):
                held[pp].append(tuple(range(first, first + stage[chunk])))
                first += stage[chunk]
        return tuple(tuple(stage) for stage in held)

    def _explicit(self, count: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        stages = self.stages or ()
        named = sorted(layer for chunks in stages for chunk in chunks for layer in chunk)
        if named != list(range(count)) or len(stages) != self.pp:
            raise ConfigError(
                f"stages: expected each of {count} layers once, in {self.pp} stages; found {len(named)} "
                f"layers, {len(set(named))} of them different, in {len(stages)} stages"
            )
        if any(len(chunks) != self.vpp for chunks in stages):
            raise ConfigError(
                f"stages: expected {self.vpp} chunk(s) for every stage, found "
                f"{sorted({len(chunks) for chunks in stages})}"
            )
        return stages
