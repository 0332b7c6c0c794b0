"""Overwriting: all of it, or every bit as before, or an error that says that it is torn."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.commit import overwrite as module
from syncline.commit.journal import Journal, JournalWriter
from syncline.commit.overwrite import apply_in_memory, attempt, overwrite, record_all, restore
from syncline.commit.recorded import Recorded
from syncline.engines.memory import ArrayTarget
from syncline.errors import CommitError, TornUpdateError, VerifyError
from syncline.types import Bits, Record, Step, TensorMeta

METAS = {"a": TensorMeta("a", "U16", (50,)), "b": TensorMeta("b", "U8", (7,))}


def weights(seed: int) -> dict[str, Bits]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.integers(0, 1 << 16, 50, np.uint16),
        "b": rng.integers(0, 1 << 8, 7, np.uint8),
    }


def changes(old: dict[str, Bits], new: dict[str, Bits]) -> list[Record]:
    where = np.flatnonzero(old["a"] != new["a"]).astype(np.uint32)
    sparse = [Record("a", 0, at, old["a"][at], new["a"][at]) for at in np.array_split(where, 5)]
    return [*sparse, Record("b", 0, None, old["b"].copy(), new["b"])]


class Faulty(ArrayTarget):
    """Fails at some call of write or flush, once or for good, before or after doing part of it."""

    def __init__(
        self, bits: dict[str, Bits], fail_at: int, error: BaseException, *, for_good: bool = False
    ) -> None:
        super().__init__(bits)
        self.calls = 0
        self.fail_at = fail_at
        self.error = error
        self.for_good = for_good

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at or (self.for_good and self.calls > self.fail_at):
            raise self.error

    def write(self, record: Record, bits: Bits) -> None:
        if self.calls + 1 == self.fail_at and record.offsets is not None:
            super().write(record, bits[::-1].copy())
        self._count()
        super().write(record, bits)

    def flush(self) -> None:
        self._count()


class Sticky(ArrayTarget):
    """Memory with a unit that takes no other value any more."""

    def write(self, record: Record, bits: Bits) -> None:
        before = int(self._bits["a"][17])
        super().write(record, bits)
        self._bits["a"][17] = before


ERRORS = [ValueError("faulty"), OSError(5, "faulty"), VerifyError("faulty"), KeyboardInterrupt()]


@pytest.mark.parametrize("fail_at", range(1, 8))
@pytest.mark.parametrize("error", ERRORS)
def test_a_failure_anywhere_is_undone(fail_at: int, error: BaseException) -> None:
    live, old, new = weights(1), weights(1), weights(2)
    expected = type(error) if isinstance(error, VerifyError | KeyboardInterrupt) else CommitError
    with pytest.raises(expected, match="faulty" if str(error) else None) as caught:
        apply_in_memory(changes(old, new), METAS, Faulty(live, fail_at, error))
    assert not isinstance(caught.value, TornUpdateError)
    for name, bits in old.items():
        assert np.array_equal(live[name], bits)


@pytest.mark.parametrize("fail_at", range(1, 8))
def test_a_failure_that_cannot_be_undone_is_torn(fail_at: int) -> None:
    live, old, new = weights(1), weights(1), weights(2)
    target = Faulty(live, fail_at, OSError(5, "broken"), for_good=True)
    with pytest.raises(TornUpdateError, match=r"broken.*undoing it failed too.*broken.*mix"):
        apply_in_memory(changes(old, new), METAS, target)


def test_memory_that_does_not_take_the_new_bits_is_noticed_and_undone() -> None:
    live, old, new = weights(1), weights(1), weights(2)
    with pytest.raises(VerifyError, match=r"'a': after writing, unit 17 must be"):
        apply_in_memory(changes(old, new), METAS, Sticky(live))
    assert all(np.array_equal(live[name], bits) for name, bits in old.items())


def test_weights_that_were_changed_behind_our_back_are_noticed() -> None:
    live, old, new = weights(1), weights(1), weights(2)
    live["b"][3] ^= 1
    mine = live["b"].copy()
    with pytest.raises(VerifyError, match=r"'b': before the update, unit 3 must be"):
        apply_in_memory(changes(old, new), METAS, ArrayTarget(live))
    assert np.array_equal(live["a"], old["a"])
    assert np.array_equal(live["b"], mine)


def test_steps_are_told_in_order() -> None:
    live, old, new = weights(1), weights(1), weights(2)
    file, seen = io.BytesIO(), []
    writer = JournalWriter(file)
    module.record_all(changes(old, new), METAS, ArrayTarget(live), writer)
    journal = Journal(file, "j", writer.finish())

    def observe(step: Step) -> None:
        seen.append(step.name)

    overwrite(journal, ArrayTarget(live), observe)
    assert seen == ["apply.record_written"] * 6 + ["apply.flushed", "apply.verified"]
    assert tuple(dict.fromkeys(seen)) == module.STEPS


@given(st.integers(0, 6), st.integers(0, 6), st.booleans())
def test_redo_and_undo_from_any_mix(done: int, again: int, back: bool) -> None:
    """After a crash some records stand and some do not; both directions lead out of it."""
    live, old, new = weights(1), weights(1), weights(2)
    listed = changes(old, new)
    for record in [*listed[:done], *listed[:again]]:
        ArrayTarget(live).write(record, record.new_bits)
    if back:
        restore(listed, ArrayTarget(live))
    else:
        overwrite(listed, ArrayTarget(live))
    assert all(np.array_equal(live[name], bits) for name, bits in (old if back else new).items())


def test_attempt_keeps_the_errors_apart() -> None:
    done: list[str] = []

    def fail(error: BaseException) -> None:
        raise error

    attempt(lambda: done.append("done"), lambda: done.append("undone"))
    assert done == ["done"]
    with pytest.raises(CommitError, match="ValueError: x; it was undone") as caught:
        attempt(lambda: fail(ValueError("x")), lambda: done.append("undone"))
    assert done == ["done", "undone"]
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(TornUpdateError, match=r"x.*y") as torn:
        attempt(lambda: fail(ValueError("x")), lambda: fail(KeyError("y")))
    assert isinstance(torn.value.__cause__, KeyError)


@pytest.mark.parametrize("threads", ["1", "2"])
def test_records_that_share_a_place_are_noticed(
    monkeypatch: pytest.MonkeyPatch, threads: str
) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", threads)
    live = weights(1)
    before = {name: bits.copy() for name, bits in live.items()}
    where, also = np.array([3, 9], np.uint32), np.array([4, 9], np.uint32)
    records = [
        Record("a", 0, where, live["a"][where], live["a"][where] ^ 1),
        Record("a", 0, also, live["a"][also], live["a"][also] ^ 2),
    ]
    with pytest.raises(VerifyError, match="'a': after writing, unit 9 must be"):
        apply_in_memory(records, METAS, ArrayTarget(live))
    for name, bits in live.items():
        np.testing.assert_array_equal(bits, before[name])


def test_tensors_that_share_memory_are_noticed_too() -> None:
    memory = np.arange(50, dtype=np.uint16)
    live = {"a": memory, "b": memory[10:17]}
    metas = {"a": METAS["a"], "b": TensorMeta("b", "U16", (7,))}
    target = ArrayTarget(live)
    assert not target.is_concurrent
    assert ArrayTarget(weights(0)).is_concurrent
    records = [
        Record(name, 0, np.array([at], np.uint32), memory[10:11].copy(), memory[10:11] ^ flip)
        for name, at, flip in (("a", 10, 1), ("b", 0, 2))
    ]
    with pytest.raises(VerifyError, match="'a': after writing, unit 10 must be"):
        apply_in_memory(records, metas, target)
    assert memory.tolist() == list(range(50))


@pytest.mark.parametrize(
    ("places", "are_apart"),
    [
        ([("a", [1, 2]), ("a", [3]), ("b", [0])], True),
        ([("a", [1, 2]), ("a", []), ("a", [3])], True),
        ([("a", [1, 5]), ("a", [3])], False),
        ([("a", [3]), ("a", [1])], False),
        ([("a", [1]), ("b", [0]), ("a", [3])], False),
    ],
)
def test_order_shows_that_records_are_apart(
    places: list[tuple[str, list[int]]], are_apart: bool
) -> None:
    live = weights(2)
    records = [
        Record(name, 0, np.array(at, np.uint32), live[name][at], live[name][at])
        for name, at in places
    ]
    with Recorded(1 << 20) as recorded:
        assert record_all(records, METAS, ArrayTarget(live), recorded) == are_apart
