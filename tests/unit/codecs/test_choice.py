from __future__ import annotations

import numpy as np
import pytest

import syncline
from syncline.codecs import choice
from syncline.errors import ConfigError
from syncline.types import TensorMeta

META = TensorMeta("w", "BF16", (1024, 1024))


def test_a_slower_link_never_gets_a_longer_payload() -> None:
    order = ["tight", "packed", "indices"]
    for changed in (100, 10_000, 100_000):
        chosen = [choice.soonest(META, changed, 10.0**power) for power in range(4, 12)]
        assert chosen == sorted(chosen, key=order.index)
        assert chosen[0] == "tight"
        assert chosen[-1] == "indices"


def test_a_dtype_without_exponent_is_never_told_by_exponents() -> None:
    integers = TensorMeta("w", "I32", (1024, 1024))
    assert choice.smallest(integers) == "packed"
    assert {choice.soonest(integers, 5000, 10.0**power) for power in range(3, 12)} == {
        "packed",
        "indices",
    }


@pytest.mark.parametrize(
    ("link_bytes_per_s", "encoding"),
    [(None, "tight"), (1e6, "tight"), (1e8, "packed"), (1e11, "indices")],
)
def test_a_publisher_takes_what_is_over_soonest(
    link_bytes_per_s: float | None, encoding: str
) -> None:
    store, engine = syncline.MemoryStore(), syncline.MemoryEngine()
    publisher = syncline.Publisher(store, link_bytes_per_s=link_bytes_per_s)
    weights = {"w": np.random.default_rng(0).standard_normal(1 << 18).astype(np.float16)}
    publisher.publish(weights)
    weights["w"].view(np.uint16)[::100] += 1
    publisher.publish(weights)
    syncline.Receiver(store, engine).sync()
    held = engine.held()
    assert held is not None
    assert held.manifest.by_name["w"].encoding == encoding
    assert (engine.view("w") == weights["w"].view(np.uint16)).all()


@pytest.mark.parametrize("speed", [0, -1.0, float("inf"), float("nan")])
def test_a_link_without_speed_is_refused(speed: float) -> None:
    with pytest.raises(ConfigError, match="link_bytes_per_s: expected a positive number"):
        syncline.Publisher(syncline.MemoryStore(), link_bytes_per_s=speed)
