"""A random history of publish, failed publish, crash, late join and sync, against a dictionary."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.abc import Buffer, Store
from syncline.errors import StoreError, VersionConflictError
from syncline.sync.fsck import check_store
from syncline.types import ObjectInfo

NAMES = ("a.weight", "b.weight", "empty", "scalar")


class FlakyStore(Store):
    """Fails the n-th call from now, before or after the call has had its effect."""

    def __init__(self) -> None:
        self._inner = MemoryStore()
        self.fail_in: int | None = None
        self.after_effect = False

    def _call(self, method: str, *arguments: object) -> object:
        if self.fail_in is None:
            return getattr(self._inner, method)(*arguments)
        self.fail_in -= 1
        if self.fail_in > 0:
            return getattr(self._inner, method)(*arguments)
        self.fail_in = None
        if self.after_effect:
            getattr(self._inner, method)(*arguments)
        raise StoreError("injected")

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        self._call("put", key, chunks)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._call("get", key, start, stop)  # type: ignore[return-value]

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self._call("list", prefix)  # type: ignore[return-value]

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        self._call("compare_and_swap", key, expected, new)

    def delete(self, key: str) -> None:
        self._call("delete", key)


class HistoryMachine(RuleBasedStateMachine):
    """The model is `published`: what the weights of each committed version are."""

    @initialize(
        encoding=st.sampled_from(["auto", "packed", "tight", "xor", "overwrite", "planes", "full"]),
        anchor_every=st.sampled_from([None, 1, 3]),
        full_encoding=st.sampled_from(["full", "planes"]),
    )
    def begin(self, encoding: str, anchor_every: int | None, full_encoding: str) -> None:
        self.options = {
            "encoding": encoding,
            "anchor_every": anchor_every,
            "full_encoding": full_encoding,
        }
        self.store = FlakyStore()
        self.weights = {
            "a.weight": np.arange(300, dtype=np.uint16).view(np.float16).reshape(20, 15).copy(),
            "b.weight": np.linspace(-1, 1, 257, dtype=np.float32),
            "empty": np.empty((0, 3), np.int8),
            "scalar": np.array(1.5, np.float64),
        }
        self.published: dict[int, dict[str, bytes]] = {}
        self.publisher = Publisher(self.store, **self.options)
        self.engines = [MemoryEngine()]

    def bytes_of_weights(self) -> dict[str, bytes]:
        return {name: array.tobytes() for name, array in self.weights.items()}

    @rule(data=st.data(), name=st.sampled_from(["a.weight", "b.weight", "scalar"]))
    def train(self, data: st.DataObject, name: str) -> None:
        flat = self.weights[name].reshape(-1).view(np.uint8)
        share = data.draw(st.sampled_from([0.002, 0.05, 1.0]))
        count = max(1, int(flat.size * share))
        seed = data.draw(st.integers(0, 2**32 - 1))
        rng = np.random.default_rng(seed)
        flat[rng.integers(0, flat.size, count)] = rng.integers(0, 256, count, np.uint8)

    @rule(full=st.booleans())
    def publish(self, full: bool) -> None:
        report = self.publisher.publish(self.weights, full=full)
        self.note_versions(report.version)

    def note_versions(self, version: int) -> None:
        self.published[version] = self.bytes_of_weights()
        current = self.publisher.version
        assert current is not None
        for number in range(version, current + 1):
            self.published[number] = self.bytes_of_weights()

    @rule(fail_in=st.integers(1, 14), after_effect=st.booleans(), full=st.booleans())
    def publish_fails(self, fail_in: int, after_effect: bool, full: bool) -> None:
        before = self.current_version()
        self.store.fail_in, self.store.after_effect = fail_in, after_effect
        try:
            report = self.publisher.publish(self.weights, full=full)
        except StoreError:
            pass
        else:
            before = report.version - 1
        self.store.fail_in = None
        # The store alone knows whether a swap whose answer got lost took effect.
        current = self.current_version()
        for number in range((before or 0) + 1, (current or 0) + 1):
            self.published[number] = self.bytes_of_weights()

    def current_version(self) -> int | None:
        from syncline.sync.history import History

        return History.open(self.store).head.version

    @rule()
    def publisher_crashes_and_another_takes_over(self) -> None:
        old = self.publisher
        self.publisher = Publisher(self.store, **self.options)
        with pytest.raises(VersionConflictError):
            old.publish(self.weights)

    @rule()
    def engine_joins_late(self) -> None:
        if len(self.engines) < 4:
            self.engines.append(MemoryEngine())

    @precondition(lambda self: self.published)
    @rule(which=st.integers(0, 3), fail_in=st.none() | st.integers(1, 12))
    def sync(self, which: int, fail_in: int | None) -> None:
        engine = self.engines[which % len(self.engines)]
        self.store.fail_in, self.store.after_effect = fail_in, False
        try:
            applied = Receiver(self.store, engine, verify="full").sync()
        except StoreError:
            assert fail_in is not None
            return
        self.store.fail_in = None
        assert applied.version == self.current_version()

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def sync_to_an_older_version(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.published)))
        engine = self.engines[-1]
        assert Receiver(self.store, engine).sync(version).version == version

    @invariant()
    def every_engine_serves_a_whole_version(self) -> None:
        for engine in getattr(self, "engines", []):
            held = engine.held()
            if held is not None:
                found = {name: engine.view(name).tobytes() for name in engine.tensors()}
                assert found == self.published[held.version]

    def teardown(self) -> None:
        if getattr(self, "published", None):
            versions, findings = check_store(self.store, deep=True, observe=lambda step: None)
            assert [item for item in findings if item.is_fault] == []
            assert versions == len(self.published)


HistoryMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestHistory = HistoryMachine.TestCase
