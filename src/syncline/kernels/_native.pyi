from collections.abc import Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

def find_changes(
    old_bits: Array,
    new_bits: Array,
    begin: int,
    unit_bytes: int,
    refresh: bool,
    offsets: Array,
    changed_old: Array,
    changed_new: Array,
    room: int,
    start: int,
    seeds: tuple[int, int] | None,
    /,
) -> tuple[int, int, int, int]: ...
def scatter(target: Array, offsets: Array, bits: Array, unit_bytes: int, /) -> bool: ...
def gather(source: Array, offsets: Array, bits: Array, unit_bytes: int, /) -> bool: ...
def compare(source: Array, offsets: Array, bits: Array, unit_bytes: int, /) -> int: ...
def check_ascending(offsets: Array, limit: int, /) -> bool: ...
def fingerprint(
    bits: Array, unit_bytes: int, start: int, seed_a: int, seed_b: int, /
) -> tuple[int, int]: ...
def fingerprint_change(
    offsets: Array,
    old_bits: Array,
    new_bits: Array,
    unit_bytes: int,
    start: int,
    seed_a: int,
    seed_b: int,
    /,
) -> tuple[int, int]: ...
def encode_gaps(offsets: Array, low_bytes: int, low: Array, high: Array, /) -> int: ...
def decode_gaps(low: Array, low_bytes: int, high: Array, limit: int, offsets: Array, /) -> bool: ...
def write_changes(
    offsets: Array,
    low_bytes: int,
    low: Array,
    high: Array,
    old_bits: Array,
    new_bits: Array,
    unit_bytes: int,
    is_step: bool,
    symbols: Array,
    excess: Array,
    /,
) -> tuple[int, int, int]: ...
def read_changes(
    low: Array,
    low_bytes: int,
    high: Array,
    base: Array,
    unit_bytes: int,
    is_step: bool,
    symbols: Array,
    bits: int,
    excess: Array,
    offsets: Array,
    old_bits: Array,
    new_bits: Array,
    /,
) -> bool: ...
def write_symbols(
    old_bits: Array,
    new_bits: Array,
    unit_bytes: int,
    is_step: bool,
    symbols: Array,
    excess: Array,
    /,
) -> tuple[int, int]: ...
def read_symbols(
    old_bits: Array,
    unit_bytes: int,
    is_step: bool,
    symbols: Array,
    bits: int,
    excess: Array,
    new_bits: Array,
    /,
) -> bool: ...
def xor(a: Array, b: Array, out: Array, /) -> None: ...
def split_planes(units: Array, unit_bytes: int, rotated: bool, planes: Array, /) -> None: ...
def join_planes(
    planes: Sequence[Array], unit_bytes: int, rotated: bool, units: Array, /
) -> None: ...
def map_positions(
    positions: Array,
    bits: Array,
    unit_bytes: int,
    axes: Array,
    first: int,
    other: int,
    mapped: Array,
    moved: Array,
    /,
) -> int: ...
def compress_literals(data: Array, frame: Array, /) -> int: ...
def literals_room(size_bytes: int, /) -> int: ...
def read_words(first: Array, second: Array, /) -> int: ...
def available_isas() -> list[str]: ...
def select_isa(name: str, /) -> bool: ...
def selected_isa() -> str: ...
def tight_rank(
    units: Array,
    offsets: Array,
    old_bits: Array,
    unit_bytes: int,
    classes: Array,
    members: Array,
    changes: Array,
    ranks: Array,
    order: Array,
    /,
) -> tuple[int, int, int]: ...
def tight_find(
    base: Array,
    unit_bytes: int,
    classes: Array,
    entries: Array,
    marks: Array,
    offsets: Array,
    order: Array,
    old_bits: Array,
    /,
) -> tuple[int, int, int]: ...
def tight_write(
    entries: Array, marks: Array, zigzag: Array, unit_bytes: int, unary: Array, fields: Array, /
) -> tuple[int, int]: ...
def tight_read(
    entries: Array,
    unary: Array,
    fields: Array,
    limit: int,
    unit_bytes: int,
    marks: Array,
    zigzag: Array,
    /,
) -> tuple[int, int, int]: ...
