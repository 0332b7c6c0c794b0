"""The benchmarks of pairs from end to end, on the tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from make_pairs import describe, make, tensors_of
from pair_statistics import statistics
from payload import measure, of_directory, row

from syncline.demo.config import DemoConfig


def test_pairs_are_made_described_and_measured(tmp_path: Path) -> None:
    import json

    out = tmp_path / "lr"
    run = make(DemoConfig(tiny=True, learning_rate=1e-5), (1, 2), out, is_warm=True)
    assert len(run["rewards"]) == 4
    (out / "pairs.json").write_text(json.dumps(run))
    found = [statistics(tensors_of(out / p["old"], out / p["new"])) for p in run["pairs"]]
    assert [pair["steps_apart"] for pair in run["pairs"]] == [1, 2, 1, 2]
    # What is two steps apart has changed more, and the first step most.
    assert found[0].changed < found[1].changed
    assert found[2].changed < found[3].changed
    assert found[2].changed < found[0].changed
    assert f"{found[0].density:.3%}" in describe(run["pairs"][0], found[0])
    title, about, old, new = list(of_directory(out))[3]
    assert about["steps_apart"] == 2
    sizes = measure(old, new, ("tight", "full"))
    assert sizes["changed"] == found[3].changed
    # Headers of all tensors weigh more than the changes of a model this small.
    assert sizes["bound_per_change"]["given exponent"] < sizes["payload_per_change"]["tight"]
    assert sizes["payload_per_change"]["tight"] < sizes["per_change"]["tight"] < 3
    assert sizes["bytes"]["full"] > sizes["full_bytes"]
    assert sizes["others_per_change"]["TRL int32 + value"] == 6.0
    assert row(title, sizes).startswith("lr 1e-05, 2 apart, later warm")
