"""What the commands print of versions that others wrote, in any layout that `syncline.interchange` knows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from syncline.abc import Interchange, Store
from syncline.cli import output
from syncline.format import names
from syncline.interchange import chain
from syncline.sources import CheckpointSource
from syncline.stores import open_store
from syncline.sync.foreign_check import rebuilt, verify_foreign
from syncline.sync.layout import foreign_layout
from syncline.version import ForeignVersion


def show_missing(sentences: Sequence[str]) -> None:
    """Print guarantees that a layout did not give, one a line."""
    for sentence in sentences:
        output.show_line(f"not guaranteed: {sentence}")


def show_versions(store: Store, layout: Interchange, *, as_json: bool) -> None:
    """Print the versions of a foreign directory, the last of its chains first."""
    rows = [_summary(at) for at in reversed(layout.versions(store))]
    if as_json:
        for row in rows:
            output.show_json(row)
        return
    columns = ("version", "base", "kind", "encoding", "checksum", "tensors", "payload")
    output.show_table(
        f"versions in the layout {layout.name}",
        columns,
        [
            (
                row["version"],
                *(_text(row[name]) for name in columns[1:6]),
                output.size(row["payload_bytes"]),
            )
            for row in rows
        ],
    )


def show_version(store: Store, layout: Interchange, version: str, *, as_json: bool) -> None:
    """Print one version of a foreign directory, tensor by tensor."""
    at = chain.find(layout.versions(store), version)
    if as_json:
        tensors = [asdict(tensor) for tensor in at.tensors]
        output.show_json({**_summary(at), "missing": list(at.missing), "tensors": tensors})
        return
    output.show_table(
        f"version {at.identity} ({at.kind}) in the layout {layout.name}",
        ("tensor", "dtype", "shape", "bytes", "digest"),
        [
            (
                tensor.name,
                "as in the base" if tensor.dtype is None else tensor.dtype,
                "" if tensor.shape is None else "x".join(map(str, tensor.shape)),
                f"{tensor.payload_bytes:,}",
                _text(tensor.digest),
            )
            for tensor in at.tensors
        ],
        caption=f"{len(at.tensors)} tensors, {output.size(at.payload_bytes)}, base {_text(at.base)}, "
        f"encoding {at.encoding}, checksum {_text(at.checksum)}",
    )
    show_missing(at.missing)


def show_verdict(
    store: Store, layout: Interchange, directory: Path, version: str | None, *, as_json: bool
) -> bool:
    """Print whether a directory holds a version; return whether nothing differs."""
    with output.progress("verifying", is_quiet=as_json) as observe:
        verdict = verify_foreign(store, layout, directory, version, observe)
    identity, mismatches = verdict.version.identity, verdict.mismatches
    if as_json:
        output.show_json(
            {
                "layout": layout.name,
                "version": identity,
                "identical": not mismatches,
                "mismatches": [asdict(item) for item in mismatches],
                "unproved": list(verdict.unproved),
            }
        )
        return not mismatches
    if mismatches:
        output.show_mismatches(f"{directory} is not version {identity} ({layout.name})", mismatches)
    else:
        proved = verdict.total - len(verdict.unproved)
        output.show_line(
            f"{directory} holds version {identity} ({layout.name}) as far as its digests say: {proved} of "
            f"{verdict.total} tensors proved"
        )
    if verdict.unproved:
        output.show_line(
            f"not guaranteed: tensors that no version here carries, {len(verdict.unproved)} in all, such "
            f"as {verdict.unproved[0]}"
        )
    return not mismatches


def opened_source(path: Path, opened: ExitStack, *, is_quiet: bool) -> CheckpointSource:
    """Return a checkpoint; of a directory of foreign versions the newest, rebuilt in temporary files."""
    has_weights = path.is_file() or any(path.glob("*" + names.PART_SUFFIX))
    layout = None if has_weights else foreign_layout(open_store(path))
    if layout is None:
        return CheckpointSource(path)
    version, source = opened.enter_context(rebuilt(open_store(path), layout))
    if not is_quiet:
        output.show_line(f"{path}: version {version.identity} in the layout {layout.name}")
    return source


def _summary(at: ForeignVersion) -> dict[str, Any]:
    return {
        "layout": at.layout,
        "version": at.identity,
        "base": at.base,
        "kind": at.kind,
        "encoding": at.encoding,
        "checksum": at.checksum,
        "tensors": len(at.tensors),
        "payload_bytes": at.payload_bytes,
    }


def _text(value: object) -> str:
    return "none" if value is None else str(value)
