"""A `Cargo` as strict JSON: what a sender says of its buckets before their first byte."""

from __future__ import annotations

from typing import cast

from syncline.errors import ConfigError, FormatError
from syncline.format import digest, names, strict_json
from syncline.format.bucket import Bucket, Cargo, Piece, check_bucket_bytes, check_tiles
from syncline.format.table import tensor_meta
from syncline.version import Kind

MAX_CARGO_BYTES = 1 << 27
"""Largest text that is looked at: some 800,000 pieces."""

_FORMAT = "syncline-cargo"
_KEYS = (
    "format",
    "format_version",
    "run_id",
    "version",
    "manifest_sha256",
    "generation",
    "kind",
    "bucket_bytes",
    "buckets",
)
_BUCKET_KEYS = ("dtype", "digest", "pieces")
_PIECE_KEYS = ("name", "shape", "start", "offset", "nbytes")


def dump(cargo: Cargo) -> bytes:
    """Return the canonical text; `load` gives the cargo back.

    Raises:
        FormatError: the cargo breaks a rule.
    """
    check_cargo(cargo)
    return strict_json.dump(
        {
            "format": _FORMAT,
            "format_version": names.FORMAT_VERSION,
            "run_id": cargo.run_id,
            "version": cargo.version,
            "manifest_sha256": cargo.manifest_sha256,
            "generation": cargo.generation,
            "kind": cargo.kind,
            "bucket_bytes": cargo.bucket_bytes,
            "buckets": [
                {
                    "dtype": bucket.dtype,
                    "digest": bucket.digest,
                    "pieces": [
                        {
                            "name": piece.meta.name,
                            "shape": list(piece.meta.shape),
                            "start": piece.start,
                            "offset": piece.offset,
                            "nbytes": piece.nbytes,
                        }
                        for piece in bucket.pieces
                    ],
                }
                for bucket in cargo.buckets
            ],
        }
    )


def load(data: bytes, where: str = "cargo") -> Cargo:
    """Return the cargo that a text stands for.

    Raises:
        FormatError: it breaks a rule; says member, expected and found.
    """
    fields = strict_json.document(data, where, _FORMAT, _KEYS, limit_bytes=MAX_CARGO_BYTES)
    cargo = Cargo(
        run_id=fields.hexadecimal("run_id", 32),
        version=fields.integer("version", minimum=1),
        manifest_sha256=fields.hexadecimal("manifest_sha256", 64),
        generation=fields.integer("generation"),
        kind=cast(Kind, fields.word("kind", "full", "delta")),
        bucket_bytes=fields.integer("bucket_bytes"),
        buckets=tuple(
            _bucket(row, where, f"buckets[{index}]")
            for index, row in enumerate(fields.items("buckets"))
        ),
    )
    check_cargo(cargo, where)
    return cargo


def identity(cargo: Cargo) -> str:
    """Return the SHA-256 of the cargo's text: two sides with the same one mean the same bytes."""
    return digest.sha256(dump(cargo))


def check_cargo(cargo: Cargo, where: str = "cargo") -> None:
    """Check every rule of a cargo; run when writing and when reading.

    Raises:
        FormatError: names the member, what it must be and what it is.
    """
    try:
        check_bucket_bytes(cargo.bucket_bytes)
    except ConfigError as error:
        raise FormatError(f"{where}: {error}") from None
    check_tiles(cargo.buckets, where)
    if cargo.longest_bytes > cargo.bucket_bytes:
        raise FormatError(
            f"{where}: a bucket must have at most {cargo.bucket_bytes} bytes, found {cargo.longest_bytes}"
        )
    for meta in cargo.metas.values():
        names.check_tensor(meta.name, f"{where}: a piece's name")
        if cargo.kind == "delta" and (meta.dtype != "U8" or len(meta.shape) != 1):
            raise FormatError(
                f"{where}: payload of {meta.name!r} must be U8 of one dimension, found {meta.dtype} "
                f"{list(meta.shape)}",
                tensor=meta.name,
            )


def _bucket(row: object, where: str, path: str) -> Bucket:
    fields = strict_json.Fields(row, where, _BUCKET_KEYS, path)
    dtype = fields.text("dtype")
    return Bucket(
        dtype,
        tuple(
            _piece(piece, dtype, where, f"{path}.pieces[{index}]")
            for index, piece in enumerate(fields.items("pieces"))
        ),
        None if fields["digest"] is None else fields.hexadecimal("digest", 32),
    )


def _piece(row: object, dtype: str, where: str, path: str) -> Piece:
    fields = strict_json.Fields(row, where, _PIECE_KEYS, path)
    meta = tensor_meta(fields.text("name"), dtype, fields["shape"], where, path)
    return Piece(meta, fields.integer("start"), fields.integer("offset"), fields.integer("nbytes"))
