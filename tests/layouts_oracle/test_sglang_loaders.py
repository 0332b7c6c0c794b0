"""SGLang's own loaders as an oracle: every parameter of every rank, name, shape and bits, padding included.

SGLang starts in the environment of `make sglang-env`, as it would to serve, and saves what its ranks hold.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from math import prod
from pathlib import Path

import numpy as np
import pytest

from shard_files import fixture_roots, read_safetensors
from syncline.layouts import EngineMesh, engine_layout, scatter

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venvs" / "sglang" / "bin" / "python"
WAIT_S = 600

CASES = [
    ("qwen3", 1, 1),
    ("qwen3", 2, 1),
    ("qwen3_moe", 1, 1),
    ("qwen3_moe", 2, 1),
    ("qwen3_moe", 2, 2),
    ("deepseek_v3", 1, 1),
    ("deepseek_v3", 2, 1),
]
# Made anew from other parameters after loading, for absorbed attention.
_DERIVED = (".w_kc", ".w_vc")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venvs/sglang: make sglang-env makes it"),
]


@pytest.mark.parametrize(("family", "tp", "ep"), CASES)
def test_rules_place_what_the_loaders_place(family: str, tp: int, ep: int, tmp_path: Path) -> None:
    if len(fixture_roots()) < 2:
        pytest.skip("needs the shared fixtures: the committed subset has no F32 checkpoints")
    source = fixture_roots()[-1] / family / "huggingface"
    model = shutil.copytree(source, tmp_path / family, copy_function=shutil.copyfile)
    config = json.loads((model / "config.json").read_text())
    if family == "deepseek_v3":
        # transformers leaves out what SGLang asks for before it makes a bias for the router.
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        (model / "config.json").write_text(json.dumps(config))
    script, out = ROOT / "tests" / "oracles" / "sglang_shards.py", tmp_path / "out"
    done = subprocess.run(
        [PYTHON, script, model, out, str(tp), str(ep)],
        env={**os.environ, "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert_placed(config, model, out, tp, ep)


def assert_placed(config: dict[str, object], model: Path, out: Path, tp: int, ep: int) -> None:
    """Compare what the ranks saved with what the tables say, bit for bit."""
    kept = read_safetensors(model / "model.safetensors")
    metas = [meta for meta, _ in kept.values()]
    layout = engine_layout(config, EngineMesh(tp, ep=ep), checkpoint=metas, engine="sglang")
    shards = {
        placement.rank: {t.name: np.zeros(prod(t.shape), np.uint32) for t in placement.tensors}
        for placement in layout.placements
    }
    scatter(layout, [kept[name] for name in layout.catalog], shards)
    for placement in layout.placements:
        saved = read_safetensors(out / f"model-rank-{placement.rank}-part-0.safetensors")
        theirs = {name: held for name, held in saved.items() if not name.endswith(_DERIVED)}
        assert {t.name: t.shape for t in placement.tensors} == {
            name: meta.shape for name, (meta, _) in theirs.items()
        }
        for name, bits in shards[placement.rank].items():
            found = theirs[name][1]
            np.testing.assert_array_equal(bits, found, err_msg=f"rank {placement.rank}: {name}")
