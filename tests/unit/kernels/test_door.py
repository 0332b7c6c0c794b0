"""The door refuses what the kernels must not see, and gives the same results whichever kernels are behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from syncline import kernels
from syncline.errors import CodecError, ConfigError, LayoutError
from syncline.kernels import (
    backend,
    literals_native,
    literals_reference,
    native,
    reference,
    tight_native,
    tight_reference,
    values,
    values_native,
    values_reference,
)

U16 = np.arange(8, dtype=np.uint16)
U32 = np.arange(3, dtype=np.uint32)
LOCKED = U16.copy()
LOCKED.flags.writeable = False
KEYS = kernels.seeds("t")

HIGH = np.zeros(3, np.uint8)
POSITIONS = np.arange(8, dtype=np.int64)


def mapped(
    positions: np.ndarray, axes: list[tuple[int, int, int]] | None = None, first: int = 0
) -> object:
    return kernels.map_positions(positions, U16, axes or [], first, 0)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "widths differ": (lambda: kernels.diff(U16, U16.view(np.uint8)), "one width"),
    "lengths differ": (lambda: kernels.diff(U16, U16[:5]), "one length, not 8 and 5"),
    "signed": (lambda: kernels.diff(U16.view(np.int16), U16), "not int16"),
    "floats": (lambda: kernels.xor(np.zeros(3), np.zeros(3)), "not float64"),
    "big-endian": (lambda: kernels.fingerprint(U16.astype(">u2"), 0, KEYS), "not >u2"),
    "two dimensions": (lambda: kernels.fingerprint(U16.reshape(2, 4), 0, KEYS), "flat"),
    "strided": (lambda: kernels.gather(U16[::2], U32), "contiguous"),
    "refresh of read-only bits": (lambda: kernels.diff(LOCKED, U16, refresh=True), "read-only"),
    "scatter into read-only bits": (lambda: kernels.scatter(LOCKED, U32, U16[:3]), "read-only"),
    "scatter of another width": (lambda: kernels.scatter(U16.copy(), U32, U32), "one width"),
    "scatter of another length": (
        lambda: kernels.scatter(U16.copy(), U32, U16[:2]),
        "3 offsets for 2 units",
    ),
    "wide offsets": (lambda: kernels.gather(U16, U32.astype(np.uint64)), "must be uint32"),
    "start below 0": (lambda: kernels.fingerprint(U16, -1, KEYS), "not -1"),
    "start beyond 64 bits": (
        lambda: kernels.fingerprint_change(1 << 63, U32, U16[:3], U16[:3], KEYS),
        "2\\*\\*62 - 1",
    ),
    "three low bytes": (lambda: kernels.encode_gaps(U32, 3), "0, 1 or 2 low bytes"),
    "three planes": (
        lambda: kernels.join_planes(np.zeros((3, 4), np.uint8)),
        "1, 2, 4 or 8 byte planes",
    ),
    "wide planes": (lambda: kernels.join_planes(np.zeros((2, 4), np.uint16)), "uint16"),
    "planes of two lengths": (lambda: kernels.join_planes([HIGH, HIGH[:2]]), "one length"),
    "narrow positions": (lambda: mapped(np.zeros(8, np.int32)), "not int32"),
    "fewer positions": (lambda: mapped(POSITIONS[:7]), "7 positions for 8 units"),
    "strides that do not fall": (lambda: mapped(POSITIONS, [(1, 2, 1), (6, 3, 2)]), "that fall"),
    "axes within each other": (lambda: mapped(POSITIONS, [(3, 2, 1), (1, 4, 1)]), "that fall"),
    "no stride": (lambda: mapped(POSITIONS, [(0, 2, 1)]), "that fall"),
    "no count": (lambda: mapped(POSITIONS, [(1, 0, 1)]), "at least 1"),
    "a block before 0": (lambda: mapped(POSITIONS, [], -1), "at -1 and 0"),
    "no planes": (lambda: kernels.join_planes([]), "not 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, says = REFUSED[case]
    with pytest.raises(LayoutError, match=says):
        call()


EMPTY = np.zeros((0, 3), np.uint8)


@pytest.mark.parametrize(
    ("low", "high", "count", "limit", "says"),
    [
        (EMPTY, HIGH, 4, 3, "4 changes are announced for a window of 3 units"),
        (EMPTY, HIGH, -1, 3, "-1 changes"),
        (EMPTY, HIGH, 2, 3, "hold 3 gaps where 2 are announced"),
        (EMPTY.astype(np.uint16), HIGH, 3, 3, "low gap bytes"),
        (EMPTY, HIGH[:2], 3, 3, "2 high gap bytes cannot hold 3 gaps"),
        (EMPTY, np.zeros(4, np.uint8), 3, 3, "expected 3 to 3"),
        (EMPTY, HIGH.astype(np.uint16), 3, 3, "high gap bytes"),
        (EMPTY, np.array([0, 0, 255], np.uint8), 3, 300, "ends? inside a gap"),
        (EMPTY, np.array([0, 0, 0, 0], np.uint8), 3, 300, "hold 4 gaps where 3"),
        (EMPTY, np.array([0, 0, 9], np.uint8), 3, 11, "offset 2 .* is 11"),
    ],
)
@pytest.mark.parametrize("behind", [values_native, values_reference])
def test_gap_bytes_that_are_refused(
    behind: object,
    low: np.ndarray,
    high: np.ndarray,
    count: int,
    limit: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(values, "fastest", lambda name: behind)
    with pytest.raises(CodecError, match=says):
        kernels.decode_gaps(low, high, count, limit)


def test_check_ascending_names_the_first_bad_offset() -> None:
    kernels.check_ascending(np.array([], np.uint32), 0)
    kernels.check_ascending(np.array([0, 1, 2**32 - 1], np.uint32), 2**32)
    with pytest.raises(CodecError, match="offset 1 of the changes is 7, which is not below"):
        kernels.check_ascending(np.array([1, 7, 3], np.uint32), 7)
    with pytest.raises(CodecError, match="offset 2 of the changes is 3.*one before it .7."):
        kernels.check_ascending(np.array([1, 7, 3], np.uint32), 8)
    with pytest.raises(CodecError, match="offset 1 of the changes is 4"):
        kernels.check_ascending(np.array([4, 4], np.uint32), 8)


@pytest.fixture
def no_choice_yet() -> Iterator[None]:
    """Every door chooses anew, before and after the test."""
    choices = [backend.is_native, backend.fastest]
    for choice in choices:
        choice.cache_clear()
    yield
    for choice in choices:
        choice.cache_clear()


@pytest.mark.parametrize(
    ("forced", "uses_native"), [(None, True), ("native", True), ("numpy", False)]
)
def test_the_environment_chooses_the_kernels(
    monkeypatch: pytest.MonkeyPatch, no_choice_yet: None, forced: str | None, uses_native: bool
) -> None:
    monkeypatch.delenv("SYNCLINE_KERNELS", raising=False)
    if forced is not None:
        monkeypatch.setenv("SYNCLINE_KERNELS", forced)
    assert backend.fastest("") is (native if uses_native else reference)
    assert backend.fastest("tight") is (tight_native if uses_native else tight_reference)
    assert backend.fastest("literals") is (literals_native if uses_native else literals_reference)
    assert backend.fastest("values") is (values_native if uses_native else values_reference)


def test_the_environment_must_name_kernels(
    monkeypatch: pytest.MonkeyPatch, no_choice_yet: None
) -> None:
    monkeypatch.setenv("SYNCLINE_KERNELS", "fast")
    with pytest.raises(ConfigError, match="expected one of native, numpy, found 'fast'"):
        backend.fastest("")


def test_without_a_compiled_core_numpy_does_the_work(
    monkeypatch: pytest.MonkeyPatch, no_choice_yet: None
) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    monkeypatch.delenv("SYNCLINE_KERNELS", raising=False)
    assert backend.fastest("") is reference
    backend.is_native.cache_clear()
    backend.fastest.cache_clear()
    monkeypatch.setenv("SYNCLINE_KERNELS", "native")
    with pytest.raises(ConfigError, match="not built here"):
        backend.fastest("")


def test_the_stub_names_what_the_compiled_core_has() -> None:
    stub = Path(kernels.__file__).with_name("_native.pyi").read_text()
    written = {line[4 : line.index("(")] for line in stub.splitlines() if line.startswith("def ")}
    built = {name for name in dir(native._native) if not name.startswith("_")}
    assert written == built
