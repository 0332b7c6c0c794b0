"""What every engine promises, over every engine there is: all of a version or none of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_cases import (
    CASES,
    FILES,
    METAS,
    Case,
    Weights,
    as_bytes,
    change,
    draw,
    held_bits,
    records,
    spans,
    version_of,
)
from syncline.abc import Engine
from syncline.errors import CodecError, LayoutError, SynclineError, VerifyError
from syncline.types import Record, Span, TensorMeta


class Setting:
    """An engine with version 1, and the weights of versions 1 and 2."""

    def __init__(self, case: Case, path: Path) -> None:
        self.case = case
        self.path = path
        self.old = case.weights(draw(1))
        self.new = change(self.old, 2)
        self.version1 = version_of(1, self.old)
        self.version2 = version_of(2, self.new)
        self.engine: Engine = case.make(path, self.old, self.version1)

    def check(self, weights: Weights, version: object) -> None:
        """The engine, and one opened anew, hold exactly these bits as this version."""
        engines = [self.engine]
        if self.case.reopen is not None:
            engines.append(self.case.reopen(self.path))
        for engine in engines:
            assert held_bits(engine) == as_bytes(weights)
            assert engine.held() == version


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.gpu if name == "torch_cuda" else ())
        for name in sorted(CASES)
    ]
)
def case(request: pytest.FixtureRequest) -> Case:
    found = CASES[request.param]
    if found.is_pretending:
        request.getfixturevalue("pretend_gpu")
    return found


@pytest.fixture
def setting(case: Case, tmp_path: Path) -> Setting:
    return Setting(case, tmp_path)


def test_tensors_and_views(setting: Setting) -> None:
    setting.check(setting.old, setting.version1)
    assert dict(setting.engine.tensors()) == {name: METAS[name] for name in setting.old}
    for name in setting.old:
        assert not setting.engine.view(name).flags.writeable
        assert setting.engine.view(name).dtype == setting.old[name].dtype


@pytest.mark.parametrize("window_units", [70, 5000, 1 << 22])
def test_apply(setting: Setting, window_units: int) -> None:
    if setting.case.is_pretending:
        window_units = max(SLOW_UNITS, window_units)
    changes = records(setting.old, setting.new, window_units=window_units)
    setting.engine.apply(changes, setting.version2)
    setting.check(setting.new, setting.version2)


def test_apply_many_versions(setting: Setting) -> None:
    weights = setting.old
    for number in range(2, 6):
        later = change(weights, number, share=0.3)
        setting.engine.apply(records(weights, later), version_of(number, later))
        weights = later
    setting.check(weights, version_of(5, weights))


def test_apply_where_everything_changes(setting: Setting) -> None:
    new = setting.case.weights(draw(3))
    setting.engine.apply(records(setting.old, new), setting.version2)
    setting.check(new, setting.version2)


def test_apply_nothing(setting: Setting) -> None:
    setting.engine.apply((), setting.version2)
    setting.check(setting.old, setting.version2)
    setting.engine.apply(iter([]), setting.version2)
    setting.check(setting.old, setting.version2)


def test_records_of_no_unit_change_nothing(setting: Setting) -> None:
    none = np.empty(0, np.uint16)
    setting.engine.apply(
        [Record("layer.long", 5, np.empty(0, np.uint32), none, none)], setting.version2
    )
    setting.check(setting.old, setting.version2)


def test_records_may_share_their_buffers(setting: Setting) -> None:
    """A decoder may reuse its arrays once the next record is asked for."""
    buffer = np.empty(1, np.uint16)
    new = {name: bits.copy() for name, bits in setting.old.items()}
    new["layer.long"][:4] ^= 1

    def changes() -> Iterator[Record]:
        for at in range(4):
            buffer[0] = new["layer.long"][at]
            old = setting.old["layer.long"][at : at + 1]
            yield Record("layer.long", at, np.zeros(1, np.uint32), old, buffer)

    setting.engine.apply(changes(), setting.version2)
    setting.check(new, setting.version2)


@pytest.mark.parametrize("after", [0, 1, 3, 1000])
@pytest.mark.parametrize(
    "fault", [VerifyError("decoded"), OSError(5, "decoded"), KeyboardInterrupt()]
)
def test_error_out_of_the_records_changes_nothing(
    setting: Setting, after: int, fault: BaseException
) -> None:
    window_units = SLOW_UNITS if setting.case.is_pretending else 50

    def changes() -> Iterator[Record]:
        every = records(setting.old, setting.new, window_units=window_units)
        for number, record in enumerate(every):
            if number == after:
                break
            yield record
        raise fault

    with pytest.raises(type(fault)) as caught:
        setting.engine.apply(changes(), setting.version2)
    assert caught.value is fault
    setting.check(setting.old, setting.version1)
    setting.engine.apply(records(setting.old, setting.new), setting.version2)
    setting.check(setting.new, setting.version2)


def bad_records(old: Weights) -> dict[str, Record]:
    good = Record(
        "layer.long",
        10,
        np.array([1, 4], np.uint32),
        old["layer.long"][[11, 14]],
        old["layer.long"][[11, 14]] ^ np.uint16(1),
    )
    wide = good.new_bits.astype(np.uint32)
    return {
        "unknown": replace(good, name="layer.unknown"),
        "prefix": replace(good, name="layer.lon"),
        "width": replace(good, old_bits=wide, new_bits=wide),
        "mixed_width": replace(good, new_bits=wide),
        "float": replace(good, new_bits=good.new_bits.view(np.float16)),
        "length": replace(good, new_bits=good.new_bits[:1]),
        "offsets_length": replace(good, offsets=good.offsets[:1]),
        "descending": replace(good, offsets=np.array([4, 1], np.uint32)),
        "repeated": replace(good, offsets=np.array([4, 4], np.uint32)),
        "outside": replace(good, offsets=np.array([1, 210_000 - 10], np.uint32)),
        "start_outside": replace(good, start=210_000),
        "start_far_outside": replace(good, start=1 << 40),
        "negative": replace(good, start=-1),
        "dense_outside": replace(good, offsets=None, start=209_999),
        "other_base": replace(good, old_bits=good.old_bits ^ np.uint16(3)),
    }


@pytest.mark.parametrize("kind", sorted(bad_records(draw(1))))
def test_bad_records_are_refused_before_anything_is_written(setting: Setting, kind: str) -> None:
    bad = bad_records(setting.old)[kind]
    changes = [*records(setting.old, setting.new), bad, *records(setting.old, setting.new)]
    with pytest.raises((LayoutError, CodecError, VerifyError)) as caught:
        setting.engine.apply(changes, setting.version2)
    assert isinstance(caught.value, SynclineError)
    setting.check(setting.old, setting.version1)


def test_two_records_that_disagree_are_undone(setting: Setting) -> None:
    """The same place twice with different bits: one of them cannot stand."""
    old = setting.old["layer.long"][:1]
    changes = [
        Record("layer.long", 0, None, old, old ^ np.uint16(1)),
        Record("layer.long", 0, np.zeros(1, np.uint32), old, old ^ np.uint16(2)),
    ]
    with pytest.raises(VerifyError, match=r"layer\.long.*after writing, unit 0"):
        setting.engine.apply([*records(setting.old, setting.new), *changes], setting.version2)
    setting.check(setting.old, setting.version1)


SLOW_UNITS = 2000
"""Units of a window where kernels are interpreted: each takes milliseconds to start."""

CAN_BE_EMPTY = sorted(name for name, case in CASES.items() if case.empty is not None)


def empty(kind: str, path: Path) -> Engine:
    make = CASES[kind].empty
    assert make is not None
    return make(path)


def test_an_engine_that_is_never_empty_refuses_to_create(setting: Setting) -> None:
    if setting.case.empty is not None:
        return
    with pytest.raises(LayoutError, match="cannot be created"):
        setting.engine.create(setting.version2, spans(setting.new), FILES)
    setting.check(setting.old, setting.version1)


@pytest.mark.parametrize("kind", CAN_BE_EMPTY)
def test_create(kind: str, tmp_path: Path) -> None:
    engine = empty(kind, tmp_path)
    assert dict(engine.tensors()) == {}
    assert engine.held() is None
    weights = draw(1)
    version = version_of(1, weights)
    engine.create(version, spans(weights, window_units=1000), FILES)
    assert held_bits(engine) == as_bytes(weights)
    assert engine.held() == version
    assert dict(engine.tensors()) == {name: METAS[name] for name in weights}


@pytest.mark.parametrize("kind", CAN_BE_EMPTY)
def test_create_of_no_tensors(kind: str, tmp_path: Path) -> None:
    engine = empty(kind, tmp_path)
    engine.create(version_of(1, {}), [], {})
    assert held_bits(engine) == {}


def faulty_spans(kind: str, weights: Weights) -> Iterator[tuple[TensorMeta, Iterator[Span]]]:
    tensors = list(spans(weights))
    if kind == "missing":
        yield from tensors[:-1]
    elif kind == "twice":
        yield from [*tensors, next(spans(weights))]
    elif kind == "other_shape":
        yield TensorMeta("layer", "F32", (105,)), iter(tensors[-1][1])
    elif kind == "unknown":
        yield TensorMeta("unknown", "U8", (1,)), iter([Span(0, np.zeros(1, np.uint8))])
    elif kind == "error_between":
        yield from tensors[:3]
        raise VerifyError("decoded")
    else:
        yield from [item for item in tensors if item[0].dtype == "F32"]
        meta = METAS["layer.long"]
        yield meta, faulty_pieces(kind, weights[meta.name])


def faulty_pieces(kind: str, bits: np.ndarray) -> Iterator[Span]:
    if kind == "hole":
        yield from (Span(0, bits[:5]), Span(6, bits[6:]))
    elif kind == "overlap":
        yield from (Span(0, bits[:5]), Span(4, bits[4:]))
    elif kind == "short":
        yield Span(0, bits[:-1])
    elif kind == "long":
        yield from (Span(0, bits), Span(bits.size, bits[:1]))
    elif kind == "width":
        yield Span(0, bits.astype(np.uint32))
    elif kind == "error_inside":
        yield Span(0, bits[:5])
        raise VerifyError("decoded")


@pytest.mark.parametrize("kind", CAN_BE_EMPTY)
@pytest.mark.parametrize(
    "fault",
    ["missing", "twice", "other_shape", "unknown", "error_between", "hole", "overlap", "short", "long",
     "width", "error_inside"],
)  # fmt: skip
def test_faulty_create_leaves_the_engine_empty(kind: str, tmp_path: Path, fault: str) -> None:
    engine = empty(kind, tmp_path)
    weights = draw(1)
    version = version_of(1, weights)
    with pytest.raises(VerifyError if fault.startswith("error") else LayoutError):
        engine.create(version, faulty_spans(fault, weights), FILES)
    assert dict(engine.tensors()) == {}
    assert engine.held() is None
    assert list(tmp_path.rglob("*.safetensors")) == []
    engine.create(version, spans(weights), FILES)
    assert held_bits(engine) == as_bytes(weights)


def test_create_only_once(setting: Setting) -> None:
    with pytest.raises(LayoutError):
        setting.engine.create(setting.version2, spans(setting.new), FILES)
    setting.check(setting.old, setting.version1)
