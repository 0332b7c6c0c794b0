"""Tensors that SGLang's loaders take together or not at all.

A loader that joins two tensors keeps the first until the second comes, within one call: handed one alone, it
drops it without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

TOGETHER = (("q_a_proj.", "kv_a_proj_with_mqa."),)
"""Parts of names; tensors that differ in nothing else belong together. DeepSeek's fused down projection."""


def partners(name: str, known: Collection[str]) -> list[str]:
    """Return the other tensors that must come with this one.

    Example:
        >>> partners("a.q_a_proj.weight", ["a.q_a_proj.weight", "a.kv_a_proj_with_mqa.weight"])
        ['a.kv_a_proj_with_mqa.weight']
    """
    others = []
    for parts in TOGETHER:
        for own in parts:
            # `kv_a_proj_with_mqa.` has no `q_a_proj.` in it, but a whole part of a dotted name is meant.
            if f".{own}" in name:
                spelled = (name.replace(f".{own}", f".{part}") for part in parts if part != own)
                others += [other for other in spelled if other in known]
    return others


def with_partners(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Return the names with everything that must come with them, each once, partners side by side.

    Example:
        >>> with_partners(["a.norm", "a.q_a_proj.w"], {"a.norm", "a.q_a_proj.w", "a.kv_a_proj_with_mqa.w"})
        ['a.norm', 'a.q_a_proj.w', 'a.kv_a_proj_with_mqa.w']
    """
    found: dict[str, None] = {}
    for name in names:
        for one in (name, *partners(name, known)):
            found.setdefault(one)
    return list(found)
