"""LoRA adapters, published as themselves: a family's table with the adapters of its matrices added.

Local names are megatron-bridge's (`X.adapter.linear_in`, `X.adapter.linear_out`), canonical names PEFT's.
The layouts have been read in its sources, not run. Merging adapters into their base is arithmetic, and
no business of layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from syncline.layouts.model import Family
from syncline.layouts.rules import Rule

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Modules that megatron-bridge adapts by default; of experts, none."""


def with_lora(family: Family, rank: int, targets: Collection[str] = TARGETS) -> Family:
    """Return the family with adapters of this rank beside the dense matrices of these modules.

    A matrix cut by rows has A cut by its rank and B as the matrix itself; one cut by columns has A as the
    matrix itself and B cut by rows. What is fused shares one A, which PEFT stores once for each part.
    """
    return replace(family, layer=tuple(_adapted(family.layer, rank, targets)))


def _adapted(rules: tuple[Rule, ...], rank: int, targets: Collection[str]) -> Iterator[Rule]:
    for rule in rules:
        module, _, ending = rule.local.partition("|")[0].rpartition(".")
        is_target = module.rpartition(".")[2] in targets and not rule.is_expert
        if not is_target:
            yield rule
            continue
        # A wrapped module keeps its own tensors under `to_wrap`.
        yield replace(rule, local=f"{module}.to_wrap.{ending}|{rule.local}")
        if ending == "weight":
            yield from _adapters(rule, module, rank)


def _adapters(rule: Rule, module: str, rank: int) -> Iterator[Rule]:
    """Yield the rules of A (`linear_in`) and B (`linear_out`) beside a matrix."""
    sides = [piece.rsplit(" ", 2) for piece in rule.pieces]
    names = [name.removesuffix(".weight:") for name, _, _ in sides]
    inputs = [
        f"{name}.lora_A.weight: {rank} {columns}"
        for name, (_, _, columns) in zip(names, sides, strict=True)
    ]
    outputs = [
        f"{name}.lora_B.weight: {rows} {rank}"
        for name, (_, rows, _) in zip(names, sides, strict=True)
    ]
    shared = tuple(dict.fromkeys(inputs))
    is_row = rule.kind == "row"
    yield replace(
        rule,
        kind="row" if is_row else "column",
        local=f"{module}.adapter.linear_in.weight",
        pieces=shared[:1],
        stored=shared[1:],
    )
    yield replace(
        rule,
        kind="column" if is_row else rule.kind,
        local=f"{module}.adapter.linear_out.weight",
        pieces=tuple(outputs),
    )
