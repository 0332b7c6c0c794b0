"""Rules broken on purpose: each must fail on real shards, or the tests of the tables test nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from shard_files import Case, case_paths, read_case
from syncline.errors import SynclineError
from syncline.layouts import (
    Block,
    Family,
    MegatronMesh,
    Rule,
    build,
    check,
    gather,
    match,
    megatron,
)
from syncline.layouts.families import BUILT_IN
from syncline.layouts.mesh import Coordinates
from syncline.layouts.rules import Cut, Piece, arrange

Break = Callable[[Family], Family]


def _rules(change: Callable[[Rule], Rule | None], where: str = "layer") -> Break:
    """Break a family by changing, or dropping, each of its rules."""

    def broken(family: Family) -> Family:
        rules = [change(rule) for rule in getattr(family, where)]
        kept = tuple(rule for rule in rules if rule is not None)
        assert kept != getattr(family, where), "this break changes nothing"
        return replace(family, **{where: kept})

    return broken


def _kind(local: str, kind: str) -> Break:
    return _rules(lambda rule: replace(rule, kind=kind) if local in rule.local else rule)


def _pieces(local: str, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Break:
    return _rules(
        lambda rule: replace(rule, pieces=change(rule.pieces)) if local in rule.local else rule
    )


def _text(old: str, new: str) -> Break:
    return _rules(
        lambda rule: replace(rule, pieces=tuple(piece.replace(old, new) for piece in rule.pieces))
    )


def _swapped(one: str, other: str, where: str = "layer") -> Break:
    def change(rule: Rule) -> Rule:
        if one in rule.local:
            return replace(rule, local=rule.local.replace(one, other))
        return replace(rule, local=rule.local.replace(other, one))

    return _rules(change, where)


FAMILY_BREAKS: dict[str, tuple[str, Break]] = {
    "gate and up swapped": ("llama/", _pieces("mlp.linear_fc1.weight", lambda p: p[::-1])),
    "q, k, v one after the other": ("qwen3/", _kind("linear_qkv", "column")),
    "k and v biases swapped": (
        "qwen2_tied/",
        _pieces("linear_qkv.bias", lambda p: (p[0], *p[:0:-1])),
    ),
    "k and v swapped": ("llama/", _pieces("linear_qkv", lambda p: (p[0], *p[:0:-1]))),
    "duplicated MLA matrix gathered": ("deepseek_v3/", _kind("linear_kv_down_proj", "column")),
    "row parallel taken for column": ("llama/", _kind("linear_proj", "column")),
    "grouped fc2 cut by rows": (
        "qwen3_moe/tp2_pp1_ep2_etp2",
        _kind("experts.linear_fc2", "column"),
    ),
    "shared expert not cut": ("deepseek_v3/", _kind("shared_experts.linear_fc1", "replicated")),
    "expert bias missed": (
        "deepseek_v3/",
        _rules(lambda rule: None if "expert_bias" in rule.local else rule),
    ),
    "q and k norms swapped": ("qwen3/", _swapped("q_layernorm", "k_layernorm")),
    "eh_proj not gathered": (
        "deepseek_v3_mtp/",
        _rules(
            lambda rule: replace(rule, kind="replicated") if "eh_proj" in rule.local else rule,
            "mtp",
        ),
    ),
    "enorm and hnorm swapped": ("deepseek_v3_mtp/", _swapped("enorm", "hnorm", "mtp")),
    "MTP layers counted from 0": (
        "deepseek_v3_mtp/",
        lambda family: replace(family, mtp_prefix="model.layers.{k}."),
    ),
    "stored copies of embedding and head forgotten": (
        "deepseek_v3_mtp/",
        lambda family: replace(family, mtp_copies=None),
    ),
    "gpt-oss gate and up not interleaved": (
        "gpt_oss/",
        _rules(
            lambda rule: replace(
                rule,
                pieces=tuple(p.replace("expert.1+1", "expert+expert") for p in rule.pieces),
            )
        ),
    ),
    "gpt-oss fc2 not transposed": ("gpt_oss/", _text("down_proj: T e", "down_proj: e")),
    "gpt-oss sinks not cut": ("gpt_oss/", _kind("softmax_offset", "replicated")),
    "gemma norms swapped": (
        "gemma3/",
        _swapped("linear_proj.post_layernorm", "linear_fc2.post_layernorm"),
    ),
    "attention gate beside q, not per head": (
        "qwen3_next/",
        _text("heads.head+head", "q+q"),
    ),
    "in_proj b and a swapped": (
        "qwen3_next/",
        _pieces("in_proj.weight", lambda p: (*p[:4], p[5], p[4])),
    ),
    "conv1d cut as one": (
        "qwen3_next/",
        _pieces(
            "conv1d",
            lambda p: (p[0].replace("key_heads*key+key_heads*key+value_heads*value#0", "256"),),
        ),
    ),
    "norm not shifted by one": (
        "qwen3_next/",
        _rules(lambda rule: replace(rule, add=0)),
    ),
}


def _cases(prefix: str) -> list[Case]:
    paths = [path for path in case_paths() if "/".join(path.parts[-2:]).startswith(prefix)]
    if not paths:
        pytest.skip(f"no shards of {prefix} in the committed subset, and no shared fixtures")
    return [read_case(path) for path in paths]


def _converts(case: Case) -> bool:
    """Say whether tables and shards still give the checkpoint."""
    try:
        layout = case.layout()
        check(layout)
        for rank, placement in enumerate(layout.placements):
            match(placement, case.found(rank))
        found = {meta.name: bits for meta, bits in gather(layout, case.bits())}
    except SynclineError:
        return False
    return all(np.array_equal(found[name], bits) for name, (_, bits) in case.checkpoint.items())


@pytest.mark.parametrize("name", FAMILY_BREAKS)
def test_a_broken_table_does_not_convert(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, broken = FAMILY_BREAKS[name]
    for case in _cases(prefix):
        assert _converts(case)
        kind = case.config["model_type"]
        monkeypatch.setattr(megatron, "families", lambda kind=kind: {kind: broken(BUILT_IN[kind])})
        assert not _converts(case)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("prefix", "local"),
    [
        ("llama/", "mlp.linear_fc1.weight"),
        ("qwen3_moe/tp2_pp1_ep2_etp2", "experts.linear_fc1.weight"),
        ("deepseek_v3/", "shared_experts.linear_fc1.weight"),
        ("qwen3_next/", "in_proj.weight"),
        ("qwen3_next/", "conv1d.weight"),
    ],
)
def test_pieces_merged_before_the_cut_do_not_convert(
    prefix: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(
        kind: str, pieces: Sequence[Piece], cut: Cut, name: str
    ) -> tuple[tuple[int, ...], list[Block], int]:
        if local in name:
            return arrange("qkv", pieces, replace(cut, groups=1), name)
        return arrange(kind, pieces, cut, name)

    for case in _cases(prefix):
        assert _converts(case)
        monkeypatch.setattr(build, "arrange", whole)
        assert not _converts(case)
        monkeypatch.undo()


@dataclass(frozen=True, slots=True)
class _NoVirtualStages(MegatronMesh):
    """Layers as if chunks did not alternate between stages."""

    def layers(self, count: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        flat = iter(range(count))
        each = count // (self.pp * self.vpp)
        return tuple(
            tuple(tuple(next(flat) for _ in range(each)) for _ in range(self.vpp))
            for _ in range(self.pp)
        )


@dataclass(frozen=True, slots=True)
class _NoExpertOffset(MegatronMesh):
    """Experts as if every rank held the first ones."""

    def coordinates(self, rank: int) -> Coordinates:
        return replace(MegatronMesh.coordinates(self, rank), ep=0)


@dataclass(frozen=True, slots=True)
class _ExpertsByTensorRank(MegatronMesh):
    """Expert ranks as if they did not fold over the tensor-parallel ones."""

    def coordinates(self, rank: int) -> Coordinates:
        at = MegatronMesh.coordinates(self, rank)
        return replace(at, ep=rank // self.tp % self.ep)


@pytest.mark.parametrize(
    ("prefix", "mesh"),
    [
        ("llama/", _NoVirtualStages),
        ("deepseek_v3/", _NoVirtualStages),
        ("qwen3_moe/", _NoExpertOffset),
        ("qwen3_moe/tp4_pp1_ep2_etp1", _ExpertsByTensorRank),
    ],
)
def test_a_broken_mesh_does_not_convert(prefix: str, mesh: type[MegatronMesh]) -> None:
    for case in _cases(prefix):
        sizes = {key: getattr(case.mesh, key) for key in ("world", "tp", "pp", "ep", "etp", "vpp")}
        assert _converts(case)
        assert not _converts(replace(case, mesh=mesh(**sizes)))


@pytest.mark.parametrize(
    ("prefix", "config"),
    [
        ("qwen3v/", {"vocab_size": 256}),
        ("qwen2_tied/", {"tie_word_embeddings": False}),
        ("llama/", {"num_key_value_heads": 4}),
        ("qwen3_moe/", {"mlp_only_layers": [1]}),
        ("deepseek_v3/", {"first_k_dense_replace": 2}),
        ("glm4_moe/", {"attention_bias": False}),
        ("qwen3/", {"model_type": "llama"}),
    ],
    ids=str,
)
def test_another_config_does_not_convert(prefix: str, config: dict[str, object]) -> None:
    for case in _cases(prefix):
        assert _converts(case)
        assert not _converts(replace(case, config={**case.config, **config}))
