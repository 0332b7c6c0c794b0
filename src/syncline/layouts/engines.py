"""Placements of vLLM and SGLang engines at any size, for planning.

At run time an engine's own loader is the truth, and placements are learned from it; these rules say
beforehand how much goes where. They are derived from a family's table: engines fuse what Megatron fuses,
but cut the parts of a fusion each by itself, and repeat KV heads. Both engines do so under names of their
own: those of vLLM 0.32 and SGLang 0.5.23, with whose loaders the rules are compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from syncline.errors import ConfigError, LayoutError
from syncline.layouts.blocks import Layout, Placement
from syncline.layouts.build import Builder, Cuts, Part, collect
from syncline.layouts.megatron import model_of
from syncline.layouts.model import Config
from syncline.layouts.parts import EMBEDDING, FINAL_NORM, OUTPUT
from syncline.layouts.rules import Cut, Rule
from syncline.types import TensorMeta

EngineName = Literal["vllm", "sglang"]
VOCAB_MULTIPLE = 64

# By the last words of the canonical pieces: the parameter that an engine fuses them into.
_FUSED: Mapping[tuple[str, ...], str] = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
}
_LATENT: Mapping[EngineName, str] = {
    "vllm": "self_attn.fused_qkv_a_proj.weight",
    "sglang": "self_attn.fused_qkv_a_proj_with_mqa.weight",
}
_EXPERTS: Mapping[EngineName, str] = {"vllm": "experts.routed_experts", "sglang": "experts"}
_INNER_SECTION = re.compile(r"(?<=\.)(\S+)#\d+")
_Q_A, _KV_A = "self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"


@dataclass(frozen=True, slots=True)
class EngineMesh:
    """Sizes of one engine.

    Attributes:
        tp: ranks; attention and dense matrices are cut among them.
        ep: 1, or `tp`: ranks hold whole experts instead of cuts of all of them.
        placement: how experts go to ranks: `linear`, the first ranks one more where they do not divide,
            or `round_robin`.
        redundant: slots beyond one for each expert; slot i of all holds expert i modulo the experts.
        slots: the expert in every slot of the engine, where it rebalances; instead of both.
    """

    tp: int = 1
    ep: int = 1
    placement: Literal["linear", "round_robin"] = "linear"
    redundant: int = 0
    slots: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep not in (1, self.tp):
            raise ConfigError(f"ep is 1 or tp; found tp={self.tp} ep={self.ep}")

    def experts(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Return the experts in the slots of each expert-parallel rank.

        Example:
            >>> EngineMesh(tp=4, ep=4).experts(10)
            ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
        """
        slots: Sequence[int]
        if self.slots is not None:
            slots = self.slots
        else:
            slots = [i % count for i in range(count + self.redundant)] if count else []
        if set(slots) != set(range(count)):
            raise LayoutError(f"slots must hold each of {count} experts, they hold {slots}")
        if self.placement == "round_robin":
            return tuple(tuple(slots[rank :: self.ep]) for rank in range(self.ep))
        each, more = divmod(len(slots), self.ep)
        edges = [rank * each + min(rank, more) for rank in range(self.ep + 1)]
        return tuple(tuple(slots[edges[r] : edges[r + 1]]) for r in range(self.ep))


def engine_layout(
    config: Config,
    mesh: EngineMesh,
    *,
    checkpoint: Iterable[TensorMeta] | None = None,
    engine: EngineName = "vllm",
) -> Layout:
    """Return catalog and placements of one engine, without draft (MTP) layers.

    Args:
        engine: whose names the local tensors have.

    Raises:
        LayoutError: no table for this model, or sizes that do not divide.
    """
    model = model_of({**config, "num_nextn_predict_layers": 0})
    metas = None if checkpoint is None else {meta.name: meta for meta in checkpoint}
    builder = Builder(model, metas)
    slots = mesh.experts(model.dims.get("experts", 0))
    copies = Counter(expert for held in slots for expert in held)
    padded = ceil(model.dims["vocab"] / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    placements = []
    for rank in range(mesh.tp):
        is_split = mesh.ep == 1
        expert_cut = Cut(rank, mesh.tp, 1) if is_split else Cut(0, 1, 1)
        dense_cut = Cut(rank, mesh.tp, 1, model.dims["groups"], padded)
        cuts = Cuts(dense_cut, expert_cut, slots[0 if is_split else rank], copies)
        placements.append(Placement(rank, *collect(_parts(builder, cuts, engine))))
    return Layout(builder.catalog, tuple(placements))


def _parts(builder: Builder, cuts: Cuts, engine: EngineName) -> Iterator[Part]:
    model, root = builder.model, builder.model.wrapper.root
    names = model.family.engine_names if engine == "vllm" else ()
    yield from builder.apply(_spelled(EMBEDDING, "embed_tokens.weight", names), [root], "", cuts)
    rules = [
        _spelled(rule, rule.local, names) for rule in _engine_rules(model.family.layer, engine)
    ]
    for layer, tags in enumerate(model.layer_tags):
        prefix = f"model.layers.{layer}."
        for rule in rules:
            if rule.holds(tags):
                yield from builder.apply(rule, [model.canonical(prefix)], prefix, cuts)
    yield from builder.apply(_spelled(FINAL_NORM, "norm.weight", names), [root], "", cuts)
    if "tie_word_embeddings" not in model.layer_tags[0]:
        head_root = [model.wrapper.head_root]
        yield from builder.apply(_spelled(OUTPUT, "lm_head.weight", names), head_root, "", cuts)


def _spelled(rule: Rule, local: str, names: Iterable[tuple[str, str]]) -> Rule:
    """Return a rule for this local name, as engines spell it."""
    for canonical, engine in names:
        local = local.replace(canonical, engine)
    return replace(rule, local=local)


def _engine_rules(rules: Iterable[Rule], engine: EngineName) -> Iterator[Rule]:
    """Yield a family's rules as an engine fuses them: canonical names, but for what is in `_FUSED`."""
    for rule in rules:
        # What Megatron takes apart head by head, an engine keeps as the checkpoint has it.
        pieces = tuple(dict.fromkeys(_INNER_SECTION.sub(r"\1", piece) for piece in rule.pieces))
        names = [piece.partition(":")[0] for piece in pieces]
        plain = replace(rule, kind=_engine_kind(rule), add=0)
        if names == [_Q_A]:
            continue
        if names == [_KV_A]:
            both = (f"{_Q_A}: q_lora hidden", *pieces)
            yield replace(plain, local=_KV_A, on="!q_lora")
            yield replace(plain, local=_LATENT[engine], pieces=both, on="q_lora")
        elif len(set(names)) == 1 or _leaves(names) in _FUSED or "{e}" in rule.local:
            yield replace(plain, local=_engine_name(names, rule, engine), pieces=pieces)
        else:
            for name in dict.fromkeys(names):
                own = tuple(piece for piece in pieces if piece.startswith(f"{name}:"))
                yield replace(plain, local=name, pieces=own)


def _engine_kind(rule: Rule) -> str:
    if rule.kind == "qkv":
        return "heads"
    # The outputs of cut experts are added up: only one rank may add the bias.
    return "first" if rule.kind == "replicated" and "{e}" in rule.local else rule.kind


def _leaves(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.rsplit(".", 2)[-2] for name in names)


def _engine_name(names: Sequence[str], rule: Rule, engine: EngineName) -> str:
    """Return the name of the parameter that holds these canonical pieces."""
    if "{e}" in rule.local:
        path = names[0].partition(".experts.")[0]
        fused = "w13" if "fc1" in rule.local else "w2"
        ending = "bias" if "bias" in rule.local else "weight"
        return f"{path}.{_EXPERTS[engine]}.{fused}_{ending}"
    if len(set(names)) == 1:
        return names[0]
    path, _, ending = names[0].rsplit(".", 2)
    return f"{path}.{_FUSED[_leaves(names)]}.{ending}"
