"""Buckets tile what they hold, and their description reads back or is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError, FormatError
from syncline.format import bucket, cargo
from syncline.format.bucket import ALIGNMENT_BYTES, Bucket, Cargo, Piece, pack
from syncline.types import TensorMeta

METAS = [
    TensorMeta("a", "BF16", (200,)),
    TensorMeta("b", "F32", (3,)),
    TensorMeta("c", "BF16", (0, 7)),
    TensorMeta("d", "BF16", ()),
    TensorMeta("e", "F4", (6,)),
]
CARGO = Cargo("ab" * 16, 3, "cd" * 32, 7, "full", 256, pack(METAS, 256))

NAMES = st.lists(st.text(min_size=1, max_size=3), unique=True, max_size=8)


@st.composite
def metas(draw: st.DrawFn) -> list[TensorMeta]:
    return [
        TensorMeta(
            name,
            draw(st.sampled_from(["U8", "BF16", "F32", "I64"])),
            tuple(draw(st.lists(st.integers(0, 20), max_size=3))),
        )
        for name in draw(NAMES)
        if name != "__metadata__"
    ]


@given(metas(), st.integers(1, 9))
def test_every_byte_of_every_tensor_lies_in_one_place(tensors, blocks):
    bucket_bytes = blocks * ALIGNMENT_BYTES
    found: dict[str, list[int]] = {meta.name: [] for meta in tensors}
    whole: dict[str, bool] = {}
    for one in pack(tensors, bucket_bytes):
        taken = [False] * bucket_bytes
        for piece in one.pieces:
            assert piece.meta.dtype == one.dtype
            assert piece.offset % ALIGNMENT_BYTES == 0
            for place in range(piece.offset, piece.stop):
                assert not taken[place]
                taken[place] = True
            found[piece.meta.name] += range(piece.start, piece.start + piece.nbytes)
            whole[piece.meta.name] = piece.nbytes == piece.meta.nbytes
    for meta in tensors:
        assert found[meta.name] == list(range(meta.nbytes))
        assert whole[meta.name] or meta.nbytes > bucket_bytes


@given(metas(), st.integers(1, 9))
def test_a_cargo_reads_back(tensors, blocks):
    bucket_bytes = blocks * ALIGNMENT_BYTES
    value = replace(CARGO, bucket_bytes=bucket_bytes, buckets=pack(tensors, bucket_bytes))
    assert cargo.load(cargo.dump(value)) == value
    assert list(value.metas.values()) == sorted(
        tensors, key=lambda meta: [other.dtype for other in tensors].index(meta.dtype)
    )


def test_a_model_is_never_given_more_memory_than_it_has():
    value = replace(CARGO, bucket_bytes=1 << 30, buckets=pack(METAS, 1 << 30))
    assert value.longest_bytes == 2 * ALIGNMENT_BYTES + 2
    assert value.nbytes == value.longest_bytes + 12 + 3


@pytest.mark.parametrize("bucket_bytes", [0, -256, 100, 257, 322122547])
def test_a_bucket_is_whole_blocks(bucket_bytes):
    with pytest.raises(ConfigError, match="multiple of 256"):
        pack(METAS, bucket_bytes)
    with pytest.raises(FormatError, match="multiple of 256"):
        cargo.dump(replace(CARGO, bucket_bytes=bucket_bytes))


LONG = TensorMeta("a", "BF16", (200,))
FIRST, SECOND = Piece(LONG, 0, 0, 256), Piece(LONG, 256, 0, 144)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([[FIRST]], "ends after 256 of 400 bytes"),
        ([[SECOND]], "from byte 0 on"),
        ([[FIRST], [FIRST]], "from byte 256 on"),
        ([[FIRST], [SECOND], [FIRST], [SECOND]], "did not come yet"),
        ([[FIRST], [replace(SECOND, offset=256)]], "offset must be 0"),
        ([[FIRST], [replace(SECOND, nbytes=146)]], "within 400 bytes"),
        ([[FIRST], [replace(SECOND, meta=TensorMeta("a", "BF16", (2, 100)))]], "from byte 256 on"),
        ([[FIRST], [replace(SECOND, meta=replace(LONG, name="b"))]], "from byte 256 on"),
        ([[replace(FIRST, nbytes=0)], [FIRST], [SECOND]], "within 400 bytes"),
        ([[replace(FIRST, nbytes=255)], [Piece(LONG, 255, 0, 145)]], "whole units of 2"),
        ([[replace(FIRST, nbytes=400)]], "at most 256 bytes, found 400"),
        ([[]], "must not be empty"),
        ([[FIRST], [SECOND, Piece(TensorMeta("b", "F32", ()), 0, 256, 4)]], "dtype must be 'BF16'"),
    ],
)
def test_pieces_that_do_not_tile_are_refused(pieces, message):
    buckets = tuple(Bucket("BF16", tuple(each)) for each in pieces)
    with pytest.raises(FormatError, match=message):
        cargo.dump(replace(CARGO, buckets=buckets))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["kind"], "part", "'full' or 'delta'"),
        (["version"], 0, "from 1 to"),
        (["run_id"], "AB" * 16, "32 lowercase"),
        (["manifest_sha256"], "x" * 64, "64 lowercase"),
        (["generation"], -1, "from 0 to"),
        (["bucket_bytes"], 1 << 64, "bucket_bytes must be an integer"),
        (["kind"], "delta", "U8 of one dimension"),
        (["buckets", 0, "digest"], "ab", "32 lowercase"),
        (["buckets", 0, "dtype"], "BF17", "BF17"),
        (["buckets", 0, "pieces", 0, "shape"], [-1], "from 0 to"),
        (["buckets", 0, "pieces", 0, "shape"], [1] * 65, "at most 64 sides"),
        (["buckets", 2, "pieces", 0, "name"], "", "a tensor's name"),
        (["buckets", 0, "pieces", 0, "offset"], True, "offset must be an integer"),
        (["buckets", 0, "pieces", 0, "extra"], 1, "not a known key"),
        (["buckets"], {}, "must be a list"),
        (["format"], "syncline-manifest", "syncline-cargo"),
        (["format_version"], 2, "upgrade"),
    ],
)
def test_what_is_not_a_cargo_is_refused(path, value, message):
    document = json.loads(cargo.dump(CARGO))
    at = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(FormatError, match=message):
        cargo.load(json.dumps(document).encode())


def test_two_sides_with_one_identity_mean_the_same():
    assert cargo.identity(CARGO) == cargo.identity(cargo.load(cargo.dump(CARGO)))
    assert cargo.identity(CARGO) != cargo.identity(replace(CARGO, generation=8))


def test_payloads_travel_as_bytes():
    payloads = [TensorMeta("w", "U8", (300,)), TensorMeta("v", "U8", (0,))]
    value = replace(CARGO, kind="delta", buckets=pack(payloads, 256))
    assert cargo.load(cargo.dump(value)) == value
    assert [piece.is_last for one in value.buckets for piece in one.pieces] == [False, True, True]
    assert bucket.aligned(value.buckets[1].pieces[0].stop) == value.buckets[1].pieces[1].offset
