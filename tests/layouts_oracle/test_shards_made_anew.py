"""Shards made anew by a bridge and megatron-core: those recorded come out as recorded, others convert.

Runs in environments of their own (`make oracles` makes them). The recorded shards are compared byte for byte, so
that what the other tests read is known to be what these packages make. Families that no recorded shard
speaks for are made here and read through our tables.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shard_files
from oracles.make_shards import MORE, RECORDED, Case, make
from shard_files import fixture_roots, read_case
from syncline.layouts import PositionMap, check, gather, match, scatter

pytestmark = pytest.mark.slow

# mbridge 0.15.1 gathers matrices that every rank holds whole; what it loads is right.
_EXPORTED_WRONG = {
    "deepseek_v3": {
        f"model.layers.{layer}.self_attn.{name}.weight"
        for layer in range(4)
        for name in ("q_a_proj", "kv_a_proj_with_mqa")
    },
    # The checkpoint stores copies that Megatron holds once.
    "deepseek_v3_mtp": {
        "model.layers.4.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight",
    },
}
TOWER = r"model\.visual\.|\d+/vision_model\."
_EXPORTED_WRONG["glm4_moe"] = _EXPORTED_WRONG["deepseek_v3_mtp"]


def made(case: Case, folder: Path) -> Path:
    """Make a case, or skip where its environment is not there."""
    if not case.python.exists():
        pytest.skip(f"no {case.python}: make oracles makes it")
    out = make(case, folder)
    # Where an export is wrong it is a fault that is known; a release that mends it should be noticed.
    wrong = set(json.loads((out / "wrong.json").read_text()))
    assert wrong == _EXPORTED_WRONG.get(case.family, set())
    return out


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case.name)
def test_recorded_shards_are_what_these_packages_make(case: Case, tmp_path: Path) -> None:
    roots = [root for root in fixture_roots()[1:] if (root / case.name).is_dir()]
    if not roots:
        pytest.skip("the whole set of recorded shards is not beside this checkout")
    out, recorded = made(case, tmp_path), roots[0] / case.name
    for name in ("config.json", "model.safetensors"):
        beside = out.parent / "huggingface" / name
        assert beside.read_bytes() == (recorded.parent / "huggingface" / name).read_bytes(), name
    files = sorted(recorded.glob("rank*.safetensors"))
    assert len(files) == case.world
    for file in files:
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name
        said = [json.loads((at / f"{file.stem}.json").read_text()) for at in (out, recorded)]
        assert said[0]["coordinates"] == said[1]["coordinates"]


def without_tower(found: shard_files.Case) -> shard_files.Case:
    """Leave out what sees: megatron-bridge lays it out anew, for which there is no table."""
    checkpoint, *shards = (
        {name: held for name, held in side.items() if not re.match(TOWER, name)}
        for side in (found.checkpoint, *found.shards)
    )
    return replace(found, checkpoint=checkpoint, shards=shards)


@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_other_families_convert_both_ways(case: Case, tmp_path: Path) -> None:
    found = without_tower(read_case(made(case, tmp_path)))
    layout = found.layout()
    check(layout)
    for rank, placement in enumerate(layout.placements):
        match(placement, found.found(rank))
    assert set(layout.catalog) == set(found.checkpoint)
    canonical = {meta.name: (meta, bits) for meta, bits in gather(layout, found.bits())}
    for name, (meta, bits) in found.checkpoint.items():
        assert canonical[name][0] == meta
        np.testing.assert_array_equal(canonical[name][1], bits, err_msg=name)
    shards = {
        rank: {name: np.zeros_like(bits) for name, bits in shard.items()}
        for rank, shard in found.bits().items()
    }
    scatter(layout, found.checkpoint.values(), shards)
    for placement in layout.placements:
        position_map = PositionMap(layout.catalog, placement)
        for local, (_, bits) in found.shards[placement.rank].items():
            np.testing.assert_array_equal(shards[placement.rank][local], bits, err_msg=local)
            positions = np.arange(bits.size)
            for name, (places, moved) in position_map.to_canonical(local, positions, bits).items():
                np.testing.assert_array_equal(found.checkpoint[name][1][places], moved)
