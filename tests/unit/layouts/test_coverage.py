"""What `check` says about layouts that are not legal: each defect, with its box."""

from __future__ import annotations

import pytest

from syncline.errors import CoverageError
from syncline.layouts import Block, CanonicalTensor, Layout, LocalTensor, Placement, check, plain
from syncline.types import TensorMeta

W = TensorMeta("w", "BF16", (4, 6))


def _layout(*blocks: Block, tensors: tuple[LocalTensor, ...] | None = None) -> Layout:
    """One rank with a local tensor `t` of 4 x 6, or with the given ones."""
    held = (LocalTensor("t", "BF16", (4, 6)),) if tensors is None else tensors
    return Layout({"w": plain(W)}, (Placement(0, held, blocks),))


def _block(start: tuple[int, int], shape: tuple[int, int], **fields: object) -> Block:
    at = start[0] * 6 + start[1]
    return Block("w", start, shape, **{"local": "t", "offset": at, "strides": (6, 1), **fields})


def test_a_whole_tensor_is_legal() -> None:
    check(_layout(_block((0, 0), (4, 6))))


def test_a_gap_is_listed_on_both_sides() -> None:
    with pytest.raises(CoverageError) as error:
        check(_layout(_block((0, 0), (4, 4))))
    assert "w[0:4, 4:6]: gap" in str(error.value)
    assert "rank 0: t[0:4, 0:6]: 8 elements are named by no block, 0 are declared" in str(
        error.value
    )


def test_an_overlap_is_listed_on_both_sides() -> None:
    with pytest.raises(CoverageError) as error:
        check(_layout(_block((0, 0), (3, 6)), _block((2, 0), (2, 6))))
    assert "w[2:3, 0:6]: overlap: 2 blocks" in str(error.value)
    assert "rank 0: t[2:3, 0:6]: overlap: 2 blocks" in str(error.value)


def test_copies_must_be_as_many_as_declared() -> None:
    whole = _block((0, 0), (4, 6), copies=2)
    one = _layout(whole)
    with pytest.raises(CoverageError, match=r"held 1 times, by ranks \[0\]; declared copies \[2\]"):
        check(one)
    second = Placement(1, one.placements[0].tensors, one.placements[0].blocks)
    check(Layout(one.catalog, (*one.placements, second)))
    third = Placement(2, one.placements[0].tensors, one.placements[0].blocks)
    with pytest.raises(CoverageError, match=r"held 3 times, by ranks \[0, 1, 2\]"):
        check(Layout(one.catalog, (*one.placements, second, third)))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (_layout(), r"w\[0:4, 0:6\]: no rank holds it"),
        (_layout(_block((0, 0), (5, 6))), r"w\[0:5, 0:6\]: outside of \[0:4, 0:6\]"),
        (_layout(_block((0, 0), (4, 6), offset=1)), r"outside of t\[0:4, 0:6\]"),
        (_layout(_block((0, 0), (4, 6), local="u")), r"u: a block names it, but the rank has no"),
        (
            _layout(Block("v", (0,), (24,), "t", 0, (1,))),
            r"v: unknown canonical tensor, held by ranks \[0\]",
        ),
        (
            _layout(
                _block((0, 0), (4, 6)),
                tensors=(LocalTensor("t", "BF16", (4, 6)), LocalTensor("unused", "BF16", (3,))),
            ),
            r"unused\[0:3\]: 3 elements are named by no block",
        ),
        (
            _layout(_block((0, 0), (4, 6)), tensors=(LocalTensor("t", "BF16", (4, 6), 2),)),
            r"0 elements are named by no block, 2 are declared padding",
        ),
    ],
)
def test_other_defects_are_listed(layout: Layout, message: str) -> None:
    with pytest.raises(CoverageError, match=message):
        check(layout)


def test_many_defects_are_counted_not_all_listed() -> None:
    blocks = [_block((row, 0), (1, 6), copies=2) for row in range(4)] * 9 + [
        _block((row, 1), (1, 2)) for row in range(4)
    ]
    with pytest.raises(CoverageError, match=r"\d+ defects") as error:
        check(_layout(*blocks))
    assert str(error.value).count("\n") <= 14
    assert "more" in str(error.value)


def test_a_scalar_and_an_empty_tensor_are_covered() -> None:
    scalar, empty = TensorMeta("s", "F32", ()), TensorMeta("e", "F32", (0, 3))
    held = (LocalTensor("s", "F32", ()), LocalTensor("e", "F32", (0, 3)))
    catalog = {"s": plain(scalar), "e": plain(empty)}
    check(Layout(catalog, (Placement(0, held, (Block("s", (), (), "s", 0, ()),)),)))
    with pytest.raises(CoverageError, match=r"s\[\]: no rank"):
        check(Layout(catalog, (Placement(0, held[1:], ()),)))


def test_interleaved_memory_is_understood() -> None:
    """Rows 0, 2 and rows 1, 3 of a local tensor belong to two halves of the canonical one."""
    even = Block("w", (0, 0), (2, 6), "t", 0, (12, 1))
    odd = Block("w", (2, 0), (2, 6), "t", 6, (12, 1))
    check(_layout(even, odd))
    with pytest.raises(CoverageError, match="overlap"):
        check(_layout(even, Block("w", (2, 0), (2, 6), "t", 0, (12, 1))))


def test_a_grid_must_split_the_shape() -> None:
    assert CanonicalTensor(W, (2, 2, 6)).grid == (2, 2, 6)
    with pytest.raises(ValueError, match="does not split"):
        CanonicalTensor(W, (6, 4))
    with pytest.raises(ValueError, match="packs elements"):
        plain(TensorMeta("p", "F4", (2, 2)))
