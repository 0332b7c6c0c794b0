"""Layouts: where every element of a canonical tensor lies, on every rank, in one algebra.

A layout is data: blocks that say "this box of that canonical tensor lies here". Families are tables of
rules that produce blocks; no family has code. See docs/explanation/layouts.md.
"""

from syncline.layouts.blocks import (
    Block,
    CanonicalTensor,
    Catalog,
    Layout,
    LocalTensor,
    Placement,
    plain,
)
from syncline.layouts.coverage import check
from syncline.layouts.dense import gather, scatter
from syncline.layouts.engines import EngineMesh, engine_layout
from syncline.layouts.megatron import match, megatron_layout, padded_rows
from syncline.layouts.mesh import MegatronMesh
from syncline.layouts.model import Family
from syncline.layouts.positions import PositionMap
from syncline.layouts.proof import fingerprint, once
from syncline.layouts.rules import Rule

__all__ = [
    "Block",
    "CanonicalTensor",
    "Catalog",
    "EngineMesh",
    "Family",
    "Layout",
    "LocalTensor",
    "MegatronMesh",
    "Placement",
    "PositionMap",
    "Rule",
    "check",
    "engine_layout",
    "fingerprint",
    "gather",
    "match",
    "megatron_layout",
    "once",
    "padded_rows",
    "plain",
    "scatter",
]
