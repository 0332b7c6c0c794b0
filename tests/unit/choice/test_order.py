"""Predictions come in the order of what was measured; the seconds are recorded ones, nothing is timed here.

What real runs took lies in `benchmarks/results`; how many bytes a throttled link would carry is counted in the test.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.abc import WeightSource
from syncline.choice import MATRIX, REFERENCE, Density, Link, Links, Topology, predict
from syncline.choice.prediction import Predicted
from syncline.types import Bits, TensorMeta

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"
UNITS = 1 << 20


def recorded(name: str) -> Any:
    return json.loads((RESULTS / f"2026-11-29-{name}.json").read_text())


def predicted(
    place: str, kind: str, density: Density, link: Link, coding: str | None = None, engines: int = 1
) -> Predicted:
    row = next(row for row in MATRIX if (row.place, row.kind) == (place, kind))
    topology = Topology(engines=engines, fabric=place == "fabric")
    machine = REFERENCE
    if coding is not None:
        only = tuple(replace(c, size_ratio=1.0) for c in REFERENCE.codings if c.name == coding)
        machine = replace(REFERENCE, codings=only)
    return predict(row, topology, density, Links(store=link, fabric=link), machine)


def test_through_a_store_packed_is_before_tight_and_both_before_all_weights() -> None:
    """`bench_sync.py`: 512.8 MB, 1 %, the store a local disk, as quick as it moved the full weights."""
    packed, tight = recorded("sync-packed"), recorded("sync-tight")
    nbytes = 2 * packed["parameters"]
    density = Density(nbytes, packed["changed"] / packed["parameters"])
    link = Link.of(2 * nbytes / packed["full_write_and_read_s"])
    measured = {
        "packed": packed["publish_and_sync_s"],
        "tight": tight["publish_and_sync_s"],
        "full": packed["full_write_and_read_s"],
    }
    foretold = {
        name: predicted("apart", "delta", density, link, name).terms.total_s
        for name in ("packed", "tight")
    }
    foretold["full"] = predicted("apart", "full", density, link).terms.total_s
    assert sorted(foretold, key=foretold.__getitem__) == sorted(measured, key=measured.__getitem__)
    for name in ("packed", "tight"):
        assert 0.4 < foretold[name] / measured[name] < 2.5, name


def test_over_a_collective_a_delta_is_before_all_weights() -> None:
    """`collective.py`: 469.8 MB to two engines over Gloo, 0.5 % in `indices`, as quick as a bare broadcast."""
    report = recorded("collective")
    nbytes, delta = report["bytes"], report["delta"]["rows"]
    share = delta[0]["payload_bytes"] / 6 / (nbytes / 2)  # 4 bytes of place and 2 of value each
    link = Link.of(2 * report["full"][-1]["bare_bytes_per_s"])
    measured = {
        "full": statistics.median(report["full"][-1]["ours_s"]),
        "delta": statistics.median(row["delivery_s"] for row in delta),
    }
    density = Density(nbytes, share)
    foretold = {
        "full": predicted("fabric", "full", density, link, engines=2).terms.total_s,
        "delta": predicted("fabric", "delta", density, link, "indices", engines=2).terms.total_s,
    }
    assert measured["delta"] < measured["full"]
    assert foretold["delta"] < foretold["full"]


class Model(WeightSource):
    """One BF16 tensor, some of whose elements move by one ulp at every step."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        wide = self.rng.standard_normal(UNITS, np.float32) * np.float32(0.02)
        self.bits = (wide.view(np.uint32) >> 16).astype(np.uint16)

    def step(self, share: float) -> None:
        places = self.rng.choice(UNITS, int(share * UNITS), replace=False)
        self.bits[places] += self.rng.integers(0, 2, places.size, np.uint16) * 2 - 1

    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        yield TensorMeta("w", "BF16", (UNITS,)), self.bits


@pytest.mark.parametrize("share", [0.002, 0.01, 0.1])
def test_on_a_throttled_link_the_order_is_that_of_the_bytes_that_really_travel(
    share: float,
) -> None:
    sent: dict[str, float] = {}
    foretold: dict[str, Predicted] = {}
    speed = 10_000.0  # so slow that nothing else counts
    density = Density(2 * UNITS, share)
    for name in ("indices", "packed", "tight"):
        model, store = Model(), MemoryStore()
        publisher = Publisher(store, encoding=name)
        publisher.publish(model)
        receiver = Receiver(store, MemoryEngine())
        receiver.sync()
        model.step(share)
        published = publisher.publish(model)
        moved = receiver.sync().moved
        sent[name] = (published.moved.wire_bytes + moved.wire_bytes) / speed
        foretold[name] = predicted("apart", "delta", density, Link.of(speed), name)
        assert foretold[name].wire_bytes == pytest.approx(published.payload_bytes, rel=0.15)
    foretold_s = {name: found.terms.total_s for name, found in foretold.items()}
    by_bytes = sorted(sent, key=sent.__getitem__)
    by_prediction = sorted(foretold_s, key=foretold_s.__getitem__)
    # Changes that lie anywhere alike are as long in `tight` as in `packed`, to a few percent.
    assert by_bytes[-1] == by_prediction[-1] == "indices"
    assert abs(sent["tight"] - sent["packed"]) < 0.1 * sent["packed"]
    full = predicted("apart", "full", density, Link.of(speed))
    assert full.terms.total_s > max(foretold_s.values())
