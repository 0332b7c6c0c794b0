"""Megatron's placements, from a config and a mesh: what each rank holds, and where it belongs.

Nothing is read from the ranks: sharding follows from family, name and mesh. Attributes of Megatron's
parameters are wrong for several tensors and are not used. `match` compares the result with what a rank
really has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import ceil

from syncline.errors import LayoutError
from syncline.layouts.blocks import Block, Layout, LocalTensor, Placement, plain, row_major
from syncline.layouts.build import Builder, Cuts, Part, collect
from syncline.layouts.families import WRAPPERS, families
from syncline.layouts.mesh import Coordinates, MegatronMesh
from syncline.layouts.model import Config, Family, Model, read_model
from syncline.layouts.parts import EMBEDDING, FINAL_NORM, OUTPUT, TIED_OUTPUT
from syncline.layouts.rules import Cut, Rule
from syncline.types import TensorMeta


def model_of(config: Config, family: Family | None = None) -> Model:
    """Return the model that a `config.json` describes, of this family or one of `families()`."""
    return read_model(config, families() if family is None else family, WRAPPERS)


def megatron_layout(
    config: Config,
    mesh: MegatronMesh,
    *,
    seen: Collection[str] = (),
    padded_vocab: int | None = None,
    checkpoint: Iterable[TensorMeta] | None = None,
    mtp: int | None = None,
    family: Family | None = None,
) -> Layout:
    """Return catalog and placements of a model trained by Megatron.

    Local names are `CHUNK/name`, chunk being the virtual stage (0 where there is one).

    Args:
        config: content of the checkpoint's `config.json`.
        seen: local names of real ranks; says which spelling of a name this Megatron uses. Without it,
            the first spelling of the tables (Transformer Engine, grouped experts).
        padded_vocab: rows of the embedding over all ranks; None: the next multiple of `tp`.
        checkpoint: the canonical tensors as the checkpoint has them: gives their dtypes, and must have
            the names and shapes of the tables. What surrounds a text model (a vision tower) is held
            whole by the first stage.
        mtp: number of multi-token-prediction layers that are trained; those of the checkpoint beyond are
            left out. None: as many as the checkpoint has, without one as the config says.
        family: a table that is not registered; None: the one of the config's `model_type`.

    Raises:
        LayoutError: no such family, shards that cannot be cut so, another checkpoint.
        ConfigError: layers or ranks that do not divide.
    """
    model = model_of(config, family)
    metas = None if checkpoint is None else {meta.name: meta for meta in checkpoint}
    if metas is not None:
        found = mtp_layers(model, metas)
        mtp = found if mtp is None else mtp
        left_out = tuple(prefix for k in range(mtp, found) for prefix in model.mtp_prefixes(k))
        metas = {name: meta for name, meta in metas.items() if not name.startswith(left_out)}
    if mtp is not None:
        model = model_of({**config, "num_nextn_predict_layers": mtp}, family)
    stages = _Stages(model, mesh, seen, padded_vocab, metas)
    cache: dict[Coordinates, tuple[tuple[LocalTensor, ...], tuple[Block, ...]]] = {}
    placements = []
    for rank in range(mesh.world):
        at = mesh.coordinates(rank)
        if at not in cache:
            cache[at] = stages.held(at)
        placements.append(Placement(rank, *cache[at]))
    if metas is not None:
        stages.compare(metas)
    return Layout(stages.catalog, tuple(placements))


class _Stages(Builder):
    """Walks the stages of a mesh: which rules apply to the rank at a coordinate."""

    def __init__(
        self,
        model: Model,
        mesh: MegatronMesh,
        seen: Collection[str],
        padded_vocab: int | None,
        metas: Mapping[str, TensorMeta] | None,
    ) -> None:
        super().__init__(model, metas, seen)
        self.mesh = mesh
        self.padded_vocab = (
            ceil(model.dims["vocab"] / mesh.tp) * mesh.tp if padded_vocab is None else padded_vocab
        )

    def held(self, at: Coordinates) -> tuple[tuple[LocalTensor, ...], tuple[Block, ...]]:
        """Return what the rank at these coordinates holds."""
        return collect(self._parts(at))

    def _cuts(self, at: Coordinates, holders: int = 1) -> Cuts:
        mesh, experts = self.mesh, self.model.dims.get("experts", 0)
        if experts % mesh.ep:
            raise LayoutError(f"{experts} experts cannot be cut into {mesh.ep} equal parts")
        each, group = experts // mesh.ep, self.model.dims["groups"]
        return Cuts(
            Cut(at.tp, mesh.tp, mesh.stage_ranks // mesh.tp * holders, group, self.padded_vocab),
            Cut(at.etp, mesh.expert_tp, mesh.stage_ranks // (mesh.ep * mesh.expert_tp)),
            tuple(range(at.ep * each, (at.ep + 1) * each)),
        )

    def _parts(self, at: Coordinates) -> Iterator[Part]:
        model, last = self.model, at.pp == self.mesh.pp - 1
        tied = "tie_word_embeddings" in model.layer_tags[0]
        copies = model.family.mtp_copies if model.mtp else None
        end = f"{self.mesh.vpp - 1}/"
        twice = 2 if self.mesh.pp > 1 else 1
        embedding_holders = (twice if model.mtp else 1) + (tied and self.mesh.pp > 1)
        embed_copies = copies[0] if copies else None
        if at.pp == 0:
            yield from self._shared("0/", EMBEDDING, at, embedding_holders, embed_copies)
            yield from self._towers()
        chunks = self.mesh.layers(model.layers)[at.pp]
        for chunk, layers in enumerate(chunks):
            for i, layer in enumerate(layers):
                locals_ = [f"{chunk}/{model.wrapper.local_root}decoder.layers.{i}."]
                prefix = f"model.layers.{layer}."
                yield from self._layer(locals_, prefix, model.layer_tags[layer], at)
        if last:
            if model.mtp and at.pp:
                yield from self._shared(end, EMBEDDING, at, embedding_holders, embed_copies)
            yield from self.apply(FINAL_NORM, [end + model.wrapper.local_root], "", self._cuts(at))
            for k in range(model.mtp):
                yield from self._mtp(k, end, at)
            if not tied:
                yield from self._shared(end, OUTPUT, at, 1, copies[1] if copies else None)
            elif at.pp:
                yield from self._shared(end, TIED_OUTPUT, at, embedding_holders, None)

    def _shared(
        self, chunk: str, rule: Rule, at: Coordinates, holders: int, copy: str | None
    ) -> Iterator[Part]:
        """Yield embedding or output: held by several stages, stored again for each MTP layer."""
        prefixes = [self.model.mtp_prefix(k) for k in range(self.model.mtp)]
        stored = tuple(f"{prefix}{copy}" for prefix in prefixes) if copy else ()
        local = chunk + self.model.wrapper.local_root
        yield from self.apply(replace(rule, stored=stored), [local], "", self._cuts(at, holders))

    def _mtp(self, k: int, chunk: str, at: Coordinates) -> Iterator[Part]:
        family, local = self.model.family, f"{chunk}{self.model.wrapper.local_root}mtp.layers.{k}."
        prefix = self.model.mtp_prefix(k)
        inner = self.model.mtp_inner(k)
        for rule in family.mtp:
            yield from self.apply(rule, [local], prefix, self._cuts(at))
        locals_ = [f"{local}mtp_model_layer.", f"{local}transformer_layer."]
        yield from self._layer(locals_, inner, self.model.layer_tags[self.model.layers + k], at)

    def _layer(
        self, locals_: list[str], prefix: str, tags: frozenset[str], at: Coordinates
    ) -> Iterator[Part]:
        cuts = self._cuts(at)
        for rule in self.model.family.layer:
            if rule.holds(tags):
                yield from self.apply(rule, locals_, prefix, cuts)

    def _towers(self) -> Iterator[Part]:
        """Yield what surrounds the text part: as the checkpoint names it, whole."""
        for meta in (self.metas or {}).values():
            for canonical, local in self.model.wrapper.towers:
                if meta.name.startswith(canonical):
                    yield self._whole(meta, f"0/{local}{meta.name.removeprefix(canonical)}")

    def _whole(self, meta: TensorMeta, name: str) -> Part:
        self.catalog[meta.name] = plain(meta)
        start, strides = (0,) * len(meta.shape), row_major(meta.shape)
        block = Block(meta.name, start, meta.shape, name, 0, strides, self.mesh.stage_ranks)
        return LocalTensor(name, meta.dtype, meta.shape), [block]


def mtp_layers(model: Model, metas: Mapping[str, TensorMeta]) -> int:
    """Return how many multi-token-prediction layers a checkpoint has."""
    layers = 0
    while any(name.startswith(model.canonical(model.mtp_inner(layers))) for name in metas):
        layers += 1
    return layers


def match(placement: Placement, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Accept the tensors that a rank really has: exactly those of its placement.

    Args:
        found: dtype and shape by local name.

    Raises:
        LayoutError: a name that the tables do not know, a tensor that the rank lacks, or one of another
            dtype or shape. Lists all of them.
    """
    expected = {tensor.name: (tensor.dtype, tensor.shape) for tensor in placement.tensors}
    problems = [
        f"{name}: the family's table does not know it" for name in found if name not in expected
    ]
    for name, (dtype, shape) in expected.items():
        if name not in found:
            problems.append(f"{name}: the rank does not have it")
        elif found[name] != (dtype, shape):
            problems.append(f"{name}: expected {dtype} {shape}, found {found[name]}")
    if problems:
        listed = "\n  ".join(problems[:20])
        raise LayoutError(
            f"rank {placement.rank} does not hold what family, config and mesh say; {len(problems)} "
            f"differences:\n  {listed}"
        )


def padded_rows(found: Mapping[str, tuple[str, tuple[int, ...]]], tp: int) -> int | None:
    """Return the rows of the padded vocabulary that a rank's embedding or output tells, if it has one."""
    for name, (_, shape) in found.items():
        if name.endswith(("embedding.word_embeddings.weight", "output_layer.weight")):
            return shape[0] * tp
    return None
