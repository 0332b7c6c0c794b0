"""What every foreign layout promises, over every layout there is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from syncline import interchange, kernels
from syncline.abc import Interchange, Store
from syncline.errors import ConfigError, LayoutError
from syncline.format import checksum as checksums
from syncline.stores import FilesystemStore, MemoryStore
from syncline.types import Bits, Changes, TensorMeta, Window
from syncline.version import ForeignVersion

METAS = (
    TensorMeta("layers.0.w", "BF16", (40, 25)),
    TensorMeta("layers.1.w", "F32", (301,)),
    TensorMeta("norm", "U8", (7,)),
)
SETTINGS = {
    "slime": [(encoding, name) for encoding in ("xor", "overwrite") for name in checksums.NAMES],
    "fireworks": [("arc_v2", "adler32")],
}
"""Encodings and checksums that a layout writes; a layout that writes must have some here."""

EVERY_TENSOR = ("fireworks",)
"""Layouts whose deltas carry every tensor, changed or not."""

Weights = dict[str, tuple[TensorMeta, Bits]]

WRITTEN = [
    pytest.param(layout, encoding, checksum, id=f"{name}-{encoding}-{checksum}")
    for name, layout in interchange.LAYOUTS.items()
    if layout.writes
    for encoding, checksum in SETTINGS[name]
]


def draw(rng: np.random.Generator) -> Weights:
    return {
        meta.name: (
            meta,
            rng.integers(0, 256, meta.nbytes, np.uint8).view(f"<u{meta.unit_bytes}"),
        )
        for meta in METAS
    }


def step(weights: Weights, rng: np.random.Generator) -> Weights:
    out = {}
    for name, (meta, bits) in weights.items():
        new = bits.copy()
        if name != "norm":
            new[rng.random(bits.size) < 0.1] ^= bits.dtype.type(3)
            new[-1] ^= bits.dtype.type(1)
        out[name] = (meta, new)
    return out


def windows(old: Bits | None, new: Bits, units: int = 256) -> Iterator[Window]:
    nothing = np.empty(0, np.uint32)
    for start in range(0, new.size, units):
        piece = new[start : start + units]
        if old is None:
            yield Window(start, piece, nothing, piece[:0], piece[:0])
        else:
            offsets, before, after = kernels.diff(old[start : start + units], piece)
            yield Window(start, piece, offsets, before, after)


def write(
    layout: Interchange, store: Store, version: ForeignVersion, old: Weights | None, new: Weights
) -> ForeignVersion:
    tensors = (
        (meta, windows(None if old is None else old[name][1], bits))
        for name, (meta, bits) in new.items()
    )
    return layout.write(store, version, tensors)


def read(
    layout: Interchange, store: Store, version: ForeignVersion, base: Weights | None
) -> Weights:
    """Return the tensors that a version carries, at that version."""
    lookup = None if base is None else base.__getitem__
    out: Weights = {}
    for meta, pieces in layout.read(store, version, lookup):
        bits = (
            np.zeros(meta.unit_count, f"<u{meta.unit_bytes}")
            if base is None
            else base[meta.name][1].copy()
        )
        for piece in pieces:
            if isinstance(piece, Changes):
                bits[piece.start + piece.offsets.astype(np.int64)] = piece.bits
            else:
                bits[piece.start : piece.start + piece.bits.size] = piece.bits
        out[meta.name] = (meta, bits)
    return out


def assert_same(found: Weights, wanted: Weights) -> None:
    assert {name: meta for name, (meta, _) in found.items()} == {
        name: meta for name, (meta, _) in wanted.items()
    }
    for name, (_, bits) in wanted.items():
        assert found[name][1].tobytes() == bits.tobytes()


@pytest.fixture(params=["memory", "directory"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else FilesystemStore(tmp_path / "out")


def test_names_are_those_of_the_layouts():
    assert tuple(interchange.LAYOUTS) == interchange.NAMES
    for name in interchange.NAMES:
        assert interchange.get(name).name == name
    with pytest.raises(ConfigError, match="layout must be one of"):
        interchange.get("no such layout")


@pytest.mark.parametrize(("layout", "encoding", "checksum"), WRITTEN)
def test_what_is_written_is_read_bit_for_bit_and_recognised(store, rng, layout, encoding, checksum):
    states = [draw(rng)]
    states += [step(states[0], rng)]
    full = write(
        layout,
        store,
        ForeignVersion(layout.name, "7", None, "full", "raw", checksum),
        None,
        states[0],
    )
    delta = write(
        layout,
        store,
        ForeignVersion(layout.name, "8", full.identity, "delta", encoding, checksum),
        states[0],
        states[1],
    )
    assert layout.versions(store) == [full, delta]
    assert layout.versions(store, [full, delta]) == [full, delta]
    assert (delta.base, delta.kind, delta.encoding) == (full.identity, "delta", encoding)
    assert (delta.checksum, full.kind) == (checksum, "full")
    carried = ["layers.0.w", "layers.1.w", *(["norm"] if layout.name in EVERY_TENSOR else [])]
    assert [tensor.name for tensor in delta.tensors] == carried
    assert all(tensor.payload_bytes > 0 for tensor in delta.tensors)
    assert {info.key for info in store.list()} == {
        info.key for version in (full, delta) for info in version.objects
    }
    assert_same(read(layout, store, full, None), states[0])
    changed = {name: states[1][name] for name in carried}
    assert_same(read(layout, store, delta, states[0]), changed)
    assert interchange.recognise(store) == layout.name


@pytest.mark.parametrize(("layout", "encoding", "checksum"), WRITTEN)
def test_a_base_without_the_tensor_is_a_clear_error(store, rng, layout, encoding, checksum):
    old = draw(rng)
    delta = write(
        layout,
        store,
        ForeignVersion(layout.name, "8", "7", "delta", encoding, checksum),
        old,
        step(old, rng),
    )

    def nothing(name: str) -> tuple[TensorMeta, Bits]:
        raise LayoutError(f"no {name}", tensor=name)

    with pytest.raises(LayoutError, match="no layers"):
        next(layout.read(store, delta, nothing))


@pytest.mark.parametrize(
    "layout", [item for item in interchange.LAYOUTS.values() if item.writes], ids=lambda x: x.name
)
@pytest.mark.parametrize(
    "version",
    [
        ForeignVersion("x", "1", "0", "delta", "no such encoding", "adler32"),
        ForeignVersion("x", "1", None, "full", "no such encoding", None),
        ForeignVersion("x", "a/b", None, "full", "raw", None),
        ForeignVersion("x", "", None, "full", "raw", None),
    ],
)
def test_settings_that_a_layout_lacks_are_refused_and_nothing_is_written(store, layout, version):
    with pytest.raises(ConfigError):
        layout.write(store, version, [])
    assert store.list() == []


@pytest.mark.parametrize(
    "layout",
    [item for item in interchange.LAYOUTS.values() if not item.writes],
    ids=lambda x: x.name,
)
def test_a_layout_without_receivers_is_not_written(store, layout):
    with pytest.raises(ConfigError, match="no released receiver"):
        layout.write(store, ForeignVersion(layout.name, "1", None, "full", "raw", None), [])


def test_a_layout_that_is_only_read_says_so():
    class Quiet(type(interchange.get("slime"))):
        name = "quiet"
        writes = False
        write = Interchange.write
        files = Interchange.files

    version = ForeignVersion("quiet", "1", None, "full", "raw", None)
    with pytest.raises(ConfigError, match="layout quiet: expected one that Syncline writes"):
        Quiet().write(MemoryStore(), version, [])
    assert Quiet().files(MemoryStore(), version) == {}


def test_an_empty_store_has_no_versions_and_no_layout(store):
    from syncline.errors import FormatError

    for layout in interchange.LAYOUTS.values():
        assert layout.evidence(store, []) is None
        assert layout.versions(store) == []
    with pytest.raises(FormatError, match="found nothing"):
        interchange.recognise(store)
