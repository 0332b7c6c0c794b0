"""Ranks, stages and layers as Megatron counts them."""

from __future__ import annotations

import pytest

from syncline.errors import ConfigError
from syncline.layouts import MegatronMesh
from syncline.layouts.mesh import Coordinates


def test_experts_fold_over_the_ranks_of_a_stage() -> None:
    mesh = MegatronMesh(8, tp=2, pp=2, ep=2, etp=1)
    assert [mesh.coordinates(rank) for rank in (1, 2, 5)] == [
        Coordinates(tp=1, pp=0, ep=1, etp=0),
        Coordinates(tp=0, pp=0, ep=0, etp=0),
        Coordinates(tp=1, pp=1, ep=1, etp=0),
    ]
    assert MegatronMesh(4, tp=2, ep=2, etp=2).coordinates(2) == Coordinates(0, 0, 1, 0)


def test_pipeline_before_data_parallel() -> None:
    mesh = MegatronMesh(8, tp=2, pp=2, is_pp_before_dp=True)
    assert [mesh.coordinates(rank).pp for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("mesh", "layers", "expected"),
    [
        (MegatronMesh(2, pp=2), 4, (((0, 1),), ((2, 3),))),
        (MegatronMesh(2, pp=2, vpp=2), 4, (((0,), (2,)), ((1,), (3,)))),
        (
            MegatronMesh(3, pp=3, first_layers=1, last_layers=2),
            7,
            (((0,),), ((1, 2, 3, 4),), ((5, 6),)),
        ),
        (MegatronMesh(3, pp=3, last_layers=1), 5, (((0, 1),), ((2, 3),), ((4,),))),
        (MegatronMesh(2, pp=2, counts_embedding=True), 5, (((0, 1),), ((2, 3, 4),))),
        (MegatronMesh(2, pp=2, counts_embedding=True, counts_loss=True), 4, (((0, 1),), ((2, 3),))),
        (
            MegatronMesh(2, pp=2, vpp=2, counts_embedding=True, counts_loss=True),
            6,
            (((0,), (3, 4)), ((1, 2), (5,))),
        ),
        (MegatronMesh(2, pp=2, stages=(((0, 1, 2),), ((3,),))), 4, (((0, 1, 2),), ((3,),))),
    ],
)
def test_layers_go_to_stages(
    mesh: MegatronMesh, layers: int, expected: tuple[tuple[tuple[int, ...], ...], ...]
) -> None:
    assert mesh.layers(layers) == expected


@pytest.mark.parametrize(
    "sizes",
    [
        {"world": 6, "tp": 4},
        {"world": 8, "tp": 2, "ep": 3},
        {"world": 4, "tp": 0},
        {"world": 4, "tp": 2, "pp": 2, "ep": 2, "etp": 2},
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        MegatronMesh(**sizes)


@pytest.mark.parametrize(
    "mesh",
    [
        MegatronMesh(2, pp=2),
        MegatronMesh(2, pp=2, vpp=2),
        MegatronMesh(2, pp=2, first_layers=1, last_layers=5),
        MegatronMesh(2, pp=2, stages=(((0, 1, 2),), ((2, 3),))),
        MegatronMesh(2, pp=2, vpp=2, stages=(((0, 1, 2, 3, 4),), ())),
    ],
)
def test_layers_that_do_not_divide_are_refused(mesh: MegatronMesh) -> None:
    with pytest.raises(ConfigError):
        mesh.layers(5)
