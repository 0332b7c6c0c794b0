"""What is learned of a loader, against what the same loader does with real tensors.

The oracle numbers every element of a checkpoint and loads the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.engines.learned import Learned, learn, together
from syncline.engines.learned.memories import Memories
from syncline.errors import CoverageError, LayoutError, VerifyError
from syncline.layouts import Layout, check, once, scatter
from syncline.types import TensorMeta

Weights = Iterable[tuple[str, torch.Tensor]]
Shapes = dict[str, tuple[int, ...]]
UNTOUCHED = -1.0


def numbered(shapes: Shapes) -> dict[str, torch.Tensor]:
    """A checkpoint in which no two elements are equal."""
    place, tensors = 0, {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        tensors[name] = torch.arange(place, place + count, dtype=torch.float64).reshape(shape)
        place += count
    return tensors


def metas_of(shapes: Shapes) -> list[TensorMeta]:
    return [TensorMeta(name, "F64", shape) for name, shape in shapes.items()]


def params(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {
        name: torch.nn.Parameter(torch.full(shape, UNTOUCHED, dtype=torch.float64))
        for name, shape in shapes.items()
    }


def learned_of(
    load: Callable[[Weights, dict[str, torch.Tensor]], object],
    shapes: Shapes,
    live: dict[str, torch.Tensor],
) -> Learned:
    """Learn, prove that nothing was written, and prove every block by the oracle."""
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    learned = learn(lambda weights: load(weights, live), metas_of(shapes), live)
    for name, tensor in live.items():
        assert torch.equal(tensor, before[name]), name
    ours = {m.name: np.full(m.flat.numel(), UNTOUCHED).view("<u8") for m in Memories(live)}
    mapped = [
        (tensor.meta, numbered(shapes)[name].numpy().reshape(-1).view("<u8"))
        for name, tensor in learned.layout.catalog.items()
    ]
    scatter(Layout(learned.layout.catalog, (learned.placement,)), mapped, {0: ours})
    given_ = [(n, t) for n, t in numbered(shapes).items() if n in learned.layout.catalog]
    with torch.no_grad():
        load(given_, live)
    for memory in Memories(live):
        found = ours[memory.name].view("<f8")
        assert np.array_equal(found, memory.bits().view("<f8")), memory.name
    return learned


def plain_load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
    for name, tensor in weights:
        live[name].data.copy_(tensor)


def test_a_plain_loader() -> None:
    shapes = {"a": (4, 6), "b": (5,), "c": ()}
    learned = learned_of(plain_load, shapes, params(a=(4, 6), b=(5,), c=()))
    assert (learned.unmapped, learned.absent, learned.partial) == ({}, (), ())
    check(learned.layout)


def fused(rank: int, ways: int, kv_heads: int = 2) -> Callable[[Weights, Any], None]:
    """The loader of a decoder layer as engines write it: fused, cut, heads replicated, vocabulary padded."""

    def load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights:
            if name in ("q", "k", "v"):
                _load_qkv(name, tensor, live["qkv"].data, rank, ways, kv_heads)
            elif name in ("gate", "up"):
                rows = tensor.shape[0] // ways
                first = {"gate": 0, "up": rows}[name]
                shard = tensor.narrow(0, rank * rows, rows)
                live["gate_up"].data.narrow(0, first, rows).copy_(shard)
            elif name == "down":
                live["down"].data.copy_(tensor.chunk(ways, dim=1)[rank])
            elif name == "embed":
                held = live["embed"].data
                shard = tensor[rank * len(held) : (rank + 1) * len(held)]
                held[: shard.shape[0]].data.copy_(shard)
                held[shard.shape[0] :].data.fill_(0)
            else:
                live[name].data.copy_(tensor)

    return load


def _load_qkv(
    name: str, tensor: torch.Tensor, qkv: torch.Tensor, rank: int, ways: int, kv_heads: int
) -> None:
    heads = {"q": 4, "k": kv_heads, "v": kv_heads}[name]
    size = tensor.shape[0] // heads
    own = max(1, heads // ways)
    index = rank if heads >= ways else rank * heads // ways
    first = {"q": 0, "k": 4 // ways, "v": 4 // ways + max(1, kv_heads // ways)}[name]
    shard = tensor.narrow(0, index * own * size, own * size)
    qkv.narrow(0, first * size, own * size).copy_(shard)


FUSED: Shapes = {
    "q": (16, 8),
    "k": (8, 8),
    "v": (8, 8),
    "gate": (12, 8),
    "up": (12, 8),
    "down": (8, 12),
    "norm": (8,),
}


def fused_params(ways: int, kv_heads: int = 2) -> dict[str, torch.Tensor]:
    rows = 4 * (4 // ways + 2 * max(1, kv_heads // ways))
    return params(qkv=(rows, 8), gate_up=(24 // ways, 8), down=(8, 12 // ways), norm=(8,))


@pytest.mark.parametrize("ways", [1, 2])
def test_fused_and_cut(ways: int) -> None:
    workers = [learned_of(fused(rank, ways), FUSED, fused_params(ways)) for rank in range(ways)]
    for worker in workers:
        assert worker.unmapped == {}
        assert set(worker.partial) == ({*FUSED} - {"norm"} if ways > 1 else set())
    ranked = [
        learn(lambda w, r=r, live=live: fused(r, ways)(w, live), metas_of(FUSED), live, rank=r)
        for r in range(ways)
        for live in [fused_params(ways)]
    ]
    layout = together(ranked)
    check(layout)
    check(once_only(layout))


def once_only(layout: Layout) -> Layout:
    """The layout with each element named once; local tensors are then not full, so padding is not."""
    answered = once(layout)
    from dataclasses import replace

    from syncline.layouts import Placement

    placements = []
    for placement in answered.placements:
        named: dict[str, int] = {}
        for block in placement.blocks:
            named[block.local] = named.get(block.local, 0) + block.count
        tensors = tuple(
            replace(t, padding=int(np.prod(t.shape)) - named.get(t.name, 0))
            for t in placement.tensors
        )
        placements.append(Placement(placement.rank, tensors, placement.blocks))
    return Layout(answered.catalog, tuple(placements))


def test_replicated_heads_are_counted() -> None:
    shapes = {name: FUSED[name] for name in ("q", "gate", "up", "down", "norm")}
    shapes |= {"k": (4, 8), "v": (4, 8)}
    workers = [
        learn(lambda w, r=r, live=live: fused(r, 2, 1)(w, live), metas_of(shapes), live, rank=r)
        for r in range(2)
        for live in [fused_params(2, 1)]
    ]
    assert all("k" not in worker.partial for worker in workers)
    layout = together(workers)
    check(layout)
    copies = {b.name: b.copies for p in layout.placements for b in p.blocks}
    assert copies == {"q": 1, "k": 2, "v": 2, "gate": 1, "up": 1, "down": 1, "norm": 2}


def test_a_padded_vocabulary_whose_end_is_zeroed() -> None:
    """vLLM zeroes the padding rows: no copy, but it meets no checkpoint tensor."""
    live = params(embed=(16, 4))
    learned = learn_only(fused(0, 1), {"embed": (10, 4)}, live)
    assert learned.unmapped == {}
    assert (live["embed"] == UNTOUCHED).all()


def test_zeros_over_a_copied_row_are_not_mapped() -> None:
    def load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
        for _, tensor in weights:
            live["embed"].data[:10].copy_(tensor)
            live["embed"].data[9:].fill_(0)

    learned = learn_only(load, {"embed": (10, 4)}, params(embed=(16, 4)))
    assert "fill_" in learned.unmapped["embed"]


def test_a_padded_vocabulary() -> None:
    def load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
        for _, tensor in weights:
            live["embed"].data[: tensor.shape[0]].copy_(tensor)

    learned = learned_of(load, {"embed": (10, 4)}, params(embed=(16, 4)))
    assert learned.placement.tensors[0].padding == 24
    check(learned.layout)


def learn_only(
    load: Callable[[Weights, Any], object], shapes: Shapes, live: dict[str, torch.Tensor]
) -> Learned:
    return learn(lambda weights: load(weights, live), metas_of(shapes), live)


def test_stacked_experts_some_of_them_elsewhere() -> None:
    shapes = {f"e{e}.{part}": (6, 4) for e in range(4) for part in ("gate", "up")}
    shapes |= {f"e{e}.down": (4, 6) for e in range(4)}

    def load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights:
            expert = int(name[1]) - 2
            if expert < 0:
                continue
            if name.endswith("down"):
                live["w2"].data[expert].copy_(tensor.t())
            else:
                first = 0 if name.endswith("gate") else 6
                live["w13"].data[expert][first : first + 6].copy_(tensor)

    learned = learned_of(load, shapes, params(w13=(2, 12, 4), w2=(2, 6, 4)))
    assert set(learned.absent) == {n for n in shapes if n[1] in "01"}
    assert learned.unmapped == {}


def test_tied_names_are_one_memory() -> None:
    table = torch.nn.Parameter(torch.full((6, 4), UNTOUCHED, dtype=torch.float64))
    live = {"embed": table, "head": table}
    learned = learn_only(plain_load, {"embed": (6, 4), "head": (6, 4)}, live)
    assert [(b.name, b.local, b.is_alias) for b in learned.placement.blocks] == [
        ("embed", "embed", False),
        ("head", "embed", True),
    ]
    check(learned.layout)


def test_joined_by_cat() -> None:
    """DeepSeek's q_a and kv_a come one after the other and are loaded as one."""

    def load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
        both = dict(weights)
        live["fused"].data.copy_(torch.cat([both["q_a"], both["kv_a"]], dim=0))
        live["other"].data.copy_(torch.cat([both["a"], both["b"]])[2:9].t())

    shapes = {"q_a": (6, 4), "kv_a": (5, 4), "a": (6, 4), "b": (5, 4)}
    learned = learned_of(load, shapes, params(fused=(11, 4), other=(4, 7)))
    assert learned.unmapped == {}


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(lambda t: t.t().contiguous().t(), id="there and back"),
        pytest.param(lambda t: t.view(3, 2, 4).transpose(0, 1).reshape(6, 4), id="interleaved"),
        pytest.param(lambda t: t.reshape(-1)[4:20].view(4, 4), id="flat"),
        pytest.param(lambda t: t[::2], id="even rows"),
        pytest.param(lambda t: t[:, 1::2], id="odd columns"),
        pytest.param(lambda t: t[[3, 4, 0, 1, 2, 5]], id="rows by index"),
        pytest.param(lambda t: t.index_select(1, torch.tensor([2, 3, 0, 1])), id="index_select"),
        pytest.param(lambda t: torch.stack([t, t + 0][:1]), id="stack"),
        pytest.param(lambda t: t.unsqueeze(1).expand(6, 1, 4), id="unsqueeze"),
        pytest.param(lambda t: torch.cat(t.chunk(3)[::-1]), id="chunks reversed"),
        pytest.param(lambda t: t.to(torch.float64).to("cpu").clone().detach(), id="to, clone"),
        pytest.param(lambda t: t.unbind(0)[3], id="unbind"),
        pytest.param(lambda t: t.split([1, 2, 3])[2].squeeze(), id="split"),
        pytest.param(lambda t: t.movedim(0, 1).flatten(), id="movedim, flatten"),
    ],
)
def test_moves_are_followed(move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    shapes = {"w": (6, 4)}
    moved = move(numbered(shapes)["w"])

    def load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
        for _, tensor in weights:
            live["w"].data.copy_(move(tensor))

    learned = learned_of(load, shapes, params(w=tuple(moved.shape)))
    assert learned.unmapped == {}


@pytest.mark.parametrize(
    ("move", "says"),
    [
        (lambda t, p: p.copy_(t * 2), "computes"),
        (lambda t, p: p.copy_(t.flip(0)), "computes"),
        (lambda t, p: p.copy_(t.float()), "torch.float32"),
        (lambda t, p: p.copy_(t.view(torch.int64)), "computes"),
        (lambda t, p: p.copy_(t[:1]), "repeated"),
        (lambda t, p: p.copy_(t + torch.ones(4, 4)), "computes"),
        (lambda t, p: p.copy_(torch.cat([t[:2], torch.zeros(2, 4)])), "computes"),
        (lambda t, p: p.fill_(t[0, 0].item()), "its loader raised"),
        (lambda t, p: p.fill_(t.max()), "writes with"),
        (lambda t, p: p.add_(t), "writes with aten::add_"),
        (lambda t, p: p.copy_(torch.from_numpy(t.numpy())), "its loader raised"),
        (lambda t, p: p.copy_(t.mul_(2)), "writes with aten::mul_"),
        (lambda t, p: p.copy_(torch.empty(4, 4, dtype=torch.float64).copy_(t)), "not the model"),
        (lambda t, p: p.index_copy_(0, torch.arange(4), t), "writes with"),
        (lambda t, p: p.copy_(t[torch.tensor([True, False, True, True])]), "its loader raised"),
        (lambda t, p: p.copy_(t).mul_(2), "also written"),
        (lambda t, p: p.zero_(), None),
        (lambda t, p: p.copy_(t) if t.sum() > 0 else None, "its loader raised"),
        (lambda t, p: t[9], "IndexError"),
    ],
)
def test_what_is_no_move_is_not_mapped_and_nothing_else_is_lost(
    move: Callable[[torch.Tensor, torch.Tensor], object], says: str | None
) -> None:
    shapes = {"before": (2, 2), "w": (4, 4), "after": (3,)}

    def load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights:
            if name == "w":
                move(tensor, live[name].data)
            else:
                live[name].data.copy_(tensor)

    live = params(before=(2, 2), w=(4, 4), after=(3,))
    learned = learn_only(load, shapes, live)
    assert {b.name for b in learned.placement.blocks} == {"before", "after"}
    assert all((tensor == UNTOUCHED).all() for tensor in live.values())
    if says is None:
        assert learned.absent == ("w",)
    else:
        assert says in learned.unmapped["w"]


def test_a_parameter_of_another_dtype_is_not_mapped() -> None:
    live = {"w": torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))}
    learned = learn(lambda w: plain_load(w, live), [TensorMeta("w", "F32", (3,))], live)
    assert "torch.float32 to torch.bfloat16" in learned.unmapped["w"]


def test_loaders_with_threads() -> None:
    shapes = {f"w{i}": (4, 4) for i in range(40)}

    def load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
        def one(item: tuple[str, torch.Tensor]) -> None:
            live[item[0]].data[:2].copy_(item[1].t()[:2])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, list(weights)))

    learned = learned_of(load, shapes, params(**shapes))
    assert learned.unmapped == {}


def test_a_write_from_a_thread_that_cannot_be_seen_is_found() -> None:
    live = params(w=(4,))

    def load(weights: Weights) -> None:
        list(weights)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(live["w"].data.zero_).result()

    with pytest.raises(VerifyError, match="load the model again"):
        learn(load, metas_of({"w": (4,)}), live)


def test_a_loader_that_replaces_tensors_is_refused() -> None:
    live = params(w=(4,))

    def load(weights: Weights) -> None:
        list(weights)
        live["w"].data = torch.zeros(4, dtype=torch.float64)

    with pytest.raises(LayoutError, match="'w'"):
        learn(load, metas_of({"w": (4,)}), live)


def test_a_loader_that_fails_before_its_first_tensor_is_refused() -> None:
    def load(weights: Weights) -> None:
        raise RuntimeError("no config")

    with pytest.raises(LayoutError, match="no config"):
        learn(load, metas_of({"w": (4,)}), params(w=(4,)))


def test_a_loader_that_always_fails_ends() -> None:
    def load(weights: Weights) -> None:
        for _ in weights:
            raise RuntimeError("never")

    shapes = {f"w{i}": (2,) for i in range(5)}
    learned = learn(load, metas_of(shapes), params(**shapes))
    assert set(learned.unmapped) == set(shapes)


def test_two_tensors_over_one_place_are_not_mapped() -> None:
    def load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights:
            first = 0 if name == "a" else 2
            live["w"].data[first : first + 4].copy_(tensor)

    learned = learn_only(load, {"a": (4,), "b": (4,)}, params(w=(6,)))
    assert "loaded over" in learned.unmapped["a"]
    assert "loaded over" in learned.unmapped["b"]


def test_one_tensor_in_two_places() -> None:
    def load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
        for _, tensor in weights:
            live["one"].data.copy_(tensor)
            live["two"].data.copy_(tensor.t())

    learned = learned_of(load, {"w": (3, 4)}, params(one=(3, 4), two=(4, 3)))
    assert [b.copies for b in learned.placement.blocks] == [2, 2]
    check(learned.layout)


def test_views_of_one_storage_and_strided_parameters() -> None:
    store = torch.full((60,), UNTOUCHED, dtype=torch.float64)
    live = {"a": store[4:16].view(3, 4), "b": store[20:44].view(4, 6).t()}
    learned = learned_of(plain_load, {"a": (3, 4), "b": (6, 4)}, live)
    assert learned.placement.tensors[0].shape == (60,)
    assert learned.placement.tensors[0].padding == 24
    check(learned.layout)


def test_where_meta_parameters_would_be_loaded() -> None:
    live = {"w": torch.nn.Parameter(torch.empty(4, 4, device="meta"))}
    learned = learn(lambda w: plain_load(w, live), [TensorMeta("w", "F32", (4, 4))], live)
    assert str(learned.placement.blocks[0]) == "w[0:4, 0:4] = w@0 strides (4, 1)"


def test_workers_of_different_checkpoints_do_not_go_together() -> None:
    one = learn_only(plain_load, {"a": (2,)}, params(a=(2,)))
    other = learn_only(plain_load, {"b": (2,)}, params(b=(2,)))
    with pytest.raises(LayoutError, match="different checkpoints"):
        together([one, other])


def test_a_gap_between_workers_is_found() -> None:
    workers = []
    for rank in range(2):
        live = params(w=(2, 4))

        def load(weights: Weights, live: Any = live) -> None:
            for _, tensor in weights:
                live["w"].data.copy_(tensor[:2])

        workers.append(learn(load, metas_of({"w": (4, 4)}), live, rank=rank))
    with pytest.raises(CoverageError, match="gap"):
        check(together(workers))


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    shape = [draw(st.integers(1, 6)) for _ in range(draw(st.integers(1, 3)))]
    chosen: list[tuple[Any, ...]] = [("start", tuple(shape))]
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(
            st.sampled_from(["narrow", "permute", "flatten", "split", "step", "clone", "cat"])
        )
        axis = draw(st.integers(0, 2))
        chosen.append((kind, axis, draw(st.integers(0, 5)), draw(st.integers(1, 5))))
    return chosen


def moved(tensor: torch.Tensor, chosen: list[tuple[Any, ...]]) -> torch.Tensor:
    for kind, axis, a, b in chosen[1:]:
        at = axis % tensor.ndim
        side = tensor.shape[at]
        if kind == "narrow" and side > a % side:
            tensor = tensor.narrow(at, a % side, min(b, side - a % side))
        elif kind == "permute":
            tensor = tensor.transpose(0, at)
        elif kind == "flatten":
            tensor = tensor.reshape(-1)
        elif kind == "split" and side % b == 0:
            sides = [*tensor.shape[:at], side // b, b, *tensor.shape[at + 1 :]]
            tensor = tensor.reshape(sides)
        elif kind == "step":
            tensor = tensor[(*[slice(None)] * at, slice(a % side, None, b))]
        elif kind == "clone":
            tensor = tensor.contiguous().clone()
        elif kind == "cat" and side > 1:
            first = tensor.narrow(at, 0, 1)
            tensor = torch.cat([tensor.narrow(at, 1, side - 1), first], dim=at)
    return tensor


@given(moves())
def test_random_moves_are_followed_exactly_or_not_at_all(chosen: list[tuple[Any, ...]]) -> None:
    shapes = {"w": chosen[0][1]}
    target = moved(numbered(shapes)["w"], chosen)

    def load(weights: Weights, live: dict[str, torch.Tensor]) -> None:
        for _, tensor in weights:
            live["t"].data.copy_(moved(tensor, chosen))

    learned_of(load, shapes, params(t=tuple(target.shape)))


def lazily(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    yield from weights


def test_lazy_loaders() -> None:
    shapes = {"a": (2,), "b": (3,)}
    learned = learned_of(lambda w, live: plain_load(lazily(w), live), shapes, params(**shapes))
    assert learned.unmapped == {}
