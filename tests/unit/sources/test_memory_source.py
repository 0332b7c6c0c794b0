"""Weights in memory: what may be handed over, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.errors import ConfigError, LayoutError
from syncline.sources import CheckpointSource, MemorySource, as_source

torch = pytest.importorskip("torch")


def names(source: MemorySource) -> list[str]:
    return [meta.name for meta, _ in source.tensors()]


def test_tensors_are_read_where_they_are() -> None:
    array = np.zeros(3, np.float32)
    source = MemorySource({"w": array})
    array[1] = 1.0
    ((_, bits),) = source.tensors()
    assert bits.tolist() == [0, 0x3F800000, 0]
    assert np.shares_memory(bits, array)


def test_a_name_that_comes_twice_is_refused() -> None:
    pairs = [("a", np.zeros(1)), ("b", np.zeros(1)), ("a", np.zeros(1))]
    with pytest.raises(LayoutError, match="'a' came twice"):
        names(MemorySource(pairs))


def test_a_generator_is_read_once() -> None:
    source = MemorySource((name, np.zeros(1)) for name in "ab")
    assert names(source) == ["a", "b"]
    with pytest.raises(ConfigError, match="generator"):
        names(source)


@pytest.mark.parametrize("name", ["", 3, None, b"w"])
def test_names_are_text(name: object) -> None:
    with pytest.raises(LayoutError, match="name"):
        names(MemorySource([(name, np.zeros(1))]))  # type: ignore[list-item]


@pytest.mark.parametrize("item", ["ab", np.zeros(2), ("w",), ("w", np.zeros(1), 3), ["w", 1]])
def test_items_are_pairs(item: object) -> None:
    with pytest.raises(ConfigError, match="pairs"):
        names(MemorySource([item]))  # type: ignore[list-item]


def test_as_source_takes_what_a_trainer_has() -> None:
    module = torch.nn.Linear(3, 2)
    for weights in (module.state_dict(), module.named_parameters()):
        source = as_source(weights)
        assert isinstance(source, MemorySource)
        assert names(source) == ["weight", "bias"]
    assert as_source(source) is source


@pytest.mark.parametrize("weights", ["checkpoint", b"checkpoint", 3, None, torch.nn.Linear(1, 1)])
def test_as_source_refuses_the_rest(weights: object) -> None:
    with pytest.raises(ConfigError, match="state_dict"):
        as_source(weights)  # type: ignore[arg-type]


def test_as_source_passes_sources_on(tmp_path: object) -> None:
    source = MemorySource({})
    assert as_source(source) is source
    assert issubclass(CheckpointSource, type(source).__mro__[1])
