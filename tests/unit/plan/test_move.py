"""Plans followed over channels, each rank in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import numpy as np
import pytest

from random_layouts import empty_shards, random_values
from syncline.abc import Buffer, Channel
from syncline.errors import PlanDisagreementError, PlanError
from syncline.layouts import (
    EngineMesh,
    Layout,
    MegatronMesh,
    engine_layout,
    megatron_layout,
    scatter,
)
from syncline.plan import Mover, Plan, make_plan, receive, send

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "num_experts": 4,
    "moe_intermediate_size": 16,
}
WAIT_S = 20.0


class Pair(Channel):
    """One end of two queues, one each way."""

    def __init__(self, out: Queue[bytes], back: Queue[bytes]) -> None:
        self._out, self._back = out, back

    def send(self, message: Buffer) -> None:
        self._out.put(bytes(message))

    def receive(self, timeout_s: float) -> bytes:
        return self._back.get(timeout=timeout_s)

    def close(self) -> None:
        """Nothing to do: the queues go with the test."""


@pytest.fixture(scope="module")
def layouts() -> tuple[Layout, Layout]:
    source = megatron_layout(CONFIG, MegatronMesh(4, tp=2, pp=2, etp=1), padded_vocab=128)
    return source, engine_layout(CONFIG, EngineMesh(2, ep=2))


def _follow(
    plan: Plan, theirs: Plan, source: list[Mover], target: list[Mover]
) -> list[BaseException | None]:
    """Run every rank of both sides; return what each raised."""
    ends: dict[tuple[int, int], tuple[Pair, Pair]] = {}
    for rank in range(len(source)):
        for to in range(len(target)):
            out, back = Queue[bytes](), Queue[bytes]()
            ends[rank, to] = (Pair(out, back), Pair(back, out))
    calls: list[Callable[[], None]] = []
    for rank, mover in enumerate(source):
        channels = {(0, to): ends[rank, to][0] for to in range(len(target))}
        calls.append(lambda r=rank, m=mover, c=channels: send(plan, r, m, c, WAIT_S))
    for to, mover in enumerate(target):
        back_channels = {rank: ends[rank, to][1] for rank in range(len(source))}
        calls.append(lambda t=to, m=mover, c=back_channels: receive(theirs, (0, t), m, c, WAIT_S))
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(timeout=WAIT_S) for future in futures]


def _movers(layout: Layout, shards: dict[int, dict[str, np.ndarray]]) -> list[Mover]:
    return [Mover(layout, placement, shards[placement.rank]) for placement in layout.placements]


def test_every_rank_ends_with_its_own_part(layouts: tuple[Layout, Layout]) -> None:
    source, target = layouts
    values = random_values(source.catalog, np.random.default_rng(3))
    held, expected, found = empty_shards(source), empty_shards(target), empty_shards(target)
    scatter(source, values.values(), held)
    scatter(target, values.values(), expected)
    plan = make_plan(source, target, limit_bytes=1 << 13)
    assert len(plan.buckets) > 2
    assert _follow(plan, plan, _movers(source, held), _movers(target, found)) == [None] * 6
    for rank, shard in expected.items():
        for name, bits in shard.items():
            np.testing.assert_array_equal(found[rank][name], bits)


def test_nothing_moves_between_sides_that_planned_differently(
    layouts: tuple[Layout, Layout],
) -> None:
    source, target = layouts
    held, found = empty_shards(source), empty_shards(target)
    for shard in held.values():
        for bits in shard.values():
            bits[:] = 1
    plans = [make_plan(source, target, limit_bytes=1 << bits) for bits in (13, 14)]
    errors = _follow(*plans, _movers(source, held), _movers(target, found))
    assert {type(error) for error in errors} == {PlanDisagreementError}
    assert not any(bits.any() for shard in found.values() for bits in shard.values())


def test_a_missing_channel_is_named(layouts: tuple[Layout, Layout]) -> None:
    source, target = layouts
    plan = make_plan(source, target)
    mover = _movers(source, empty_shards(source))[0]
    with pytest.raises(PlanError, match=r"source rank 0 has no channel to or from \[\(0, \d\)"):
        send(plan, 0, mover, {}, WAIT_S)
    with pytest.raises(PlanError, match=r"target rank \(0, 1\) has no channel to or from \[\d"):
        receive(plan, (0, 1), _movers(target, empty_shards(target))[1], {}, WAIT_S)
