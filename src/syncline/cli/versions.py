"""`publish`, `pull`, `log` and `show`: versions in and out of a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import click

from syncline.cli import foreign, output
from syncline.cli.options import json_option, layout_option, store_argument
from syncline.codecs import NAMES
from syncline.engines import CheckpointDir
from syncline.engines.checkpoint_dir import Mode
from syncline.format.checksum import NAMES as CHECKSUMS
from syncline.format.index import CHECKSUM
from syncline.sources import CheckpointSource
from syncline.stores import open_store
from syncline.sync import AppliedVersion, Publisher, Receiver
from syncline.sync.describe import payload_sizes
from syncline.sync.followed import number_of
from syncline.sync.history import History
from syncline.sync.layout import foreign_layout
from syncline.sync.publisher import report_of
from syncline.version import HeldVersion, TensorEntry


@click.command()
@store_argument
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--base",
    type=click.Path(exists=True, path_type=Path),
    help="Checkpoint that the engines have; without it the last version is rebuilt from STORE.",
)
@click.option(
    "--encoding",
    type=click.Choice(["auto", *NAMES]),
    default="auto",
    show_default=True,
    help="Encoding of a delta.",
)
@click.option("--full", is_flag=True, help="Publish a full version instead of a delta.")
@click.option(
    "--layout",
    type=click.Choice(["syncline", "slime"]),
    default="syncline",
    show_default=True,
    help="slime: write versions that slime-family readers take too.",
)
@click.option(
    "--checksum",
    type=click.Choice(CHECKSUMS),
    default=CHECKSUM,
    show_default=True,
    help="Of new bytes, for slime-family readers.",
)
@click.option(
    "--notify", metavar="URL[,URL...]", help="Deployments to tell over the hot-load API afterwards."
)
@click.option(
    "--notify-token-env", metavar="NAME", help="Environment variable with their bearer token."
)
@json_option
def publish(
    store: str,
    checkpoint: Path,
    base: Path | None,
    encoding: str,
    full: bool,
    layout: Literal["syncline", "slime"],
    checksum: str,
    notify: str | None,
    notify_token_env: str | None,
    as_json: bool,
) -> None:
    """Publish CHECKPOINT, a safetensors file or directory, as the next version in STORE."""
    with output.progress("publishing", is_quiet=as_json) as observe:
        publisher = Publisher(
            open_store(store),
            base=base,
            encoding=encoding,
            anchor_every=None,
            layout=layout,
            checksum=checksum,
            observe=observe,
            notify=() if notify is None else notify,
            notify_token_env=notify_token_env,
        )
        report = publisher.publish(CheckpointSource(checkpoint), full=full)
    if as_json:
        output.show_json(report.as_dict())
        return
    if report.version == 1:
        output.show_line(f"a new run was begun in {store}")
    ratio = report.full_bytes / max(1, report.payload_bytes)
    output.show_line(
        f"version {report.version} ({report.kind}): {report.changed:,} of {report.total:,} elements "
        f"changed ({report.density:.3%}), {output.size(report.payload_bytes)}, "
        f"{ratio:.1f} times smaller than full, {output.seconds(report.seconds)}"
    )
    for notice in report.notices:
        output.show_line(
            f"{notice.url} took {notice.identity}"
            if notice.error is None
            else f"{notice.url} did not take {notice.identity}: {notice.error}"
        )


@click.command()
@store_argument
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--version", metavar="VERSION", help="Version to pull; default: the current.")
@click.option(
    "--mode",
    type=click.Choice(["in_place", "swap"]),
    default="in_place",
    show_default=True,
    help="Change the files, or build the next directory beside it and flip a link.",
)
@click.option("--adopt", is_flag=True, help="Take over a checkpoint that Syncline did not make.")
@click.option("--repair", is_flag=True, help="Start from a full version, put right what differs.")
@click.option("--full-verify", is_flag=True, help="Read every weight again afterwards.")
@layout_option
@json_option
def pull(
    store: str,
    directory: Path,
    version: str | None,
    mode: Mode,
    adopt: bool,
    repair: bool,
    full_verify: bool,
    layout: str,
    as_json: bool,
) -> None:
    """Bring DIRECTORY, a Hugging Face checkpoint or a new path, to a version in STORE."""
    with output.progress("pulling", is_quiet=as_json) as observe:
        engine = CheckpointDir(directory, mode=mode, adopt=adopt)
        receiver = Receiver(
            open_store(store),
            engine,
            verify="full" if full_verify else "changed",
            observe=observe,
            layout=layout,
        )
        applied = receiver.sync(version, repair=repair)
    if as_json:
        output.show_json(applied.as_dict())
        return
    steps = (
        "already there"
        if not applied.applied
        else (
            f"applied {_applied(applied)}: {applied.changed:,} elements from "
            f"{output.size(applied.payload_bytes)}"
        )
    )
    output.show_line(
        f"{directory} holds version {_name(applied)}, {steps}, {output.seconds(applied.seconds)}"
    )
    foreign.show_missing(applied.missing)


def _name(applied: AppliedVersion) -> str:
    if applied.identity is None:
        return str(applied.version)
    return f"{applied.identity} ({applied.layout})"


def _applied(applied: AppliedVersion) -> str:
    if applied.identity is None:
        return ", ".join(map(str, applied.applied))
    count = len(applied.applied)
    return "1 version" if count == 1 else f"{count} versions"


@click.command()
@store_argument
@layout_option
@json_option
def log(store: str, layout: str, as_json: bool) -> None:
    """List the versions in STORE, newest first."""
    found = foreign_layout(open_store(store), layout)
    if found is not None:
        foreign.show_versions(open_store(store), found, as_json=as_json)
        return
    rows = [_summary(at) for at in History.open(open_store(store)).back()]
    if as_json:
        for row in rows:
            output.show_json(row)
        return
    output.show_table(
        "versions",
        ("version", "kind", "encoding", "changed", "density", "payload", "smaller", "manifest"),
        [
            (
                row["version"],
                row["kind"],
                " ".join(row["encodings"]),
                f"{row['changed']:,}",
                f"{row['density']:.3%}",
                output.size(row["payload_bytes"]),
                f"{row['full_bytes'] / max(1, row['payload_bytes']):.1f}x",
                row["manifest_sha256"][:12],
            )
            for row in rows
        ],
    )


@click.command()
@store_argument
@click.argument("version")
@layout_option
@json_option
def show(store: str, version: str, layout: str, as_json: bool) -> None:
    """Show one VERSION in STORE: encoding, bytes and density of each tensor."""
    opened = open_store(store)
    found = foreign_layout(opened, layout)
    if found is not None:
        foreign.show_version(opened, found, version, as_json=as_json)
        return
    at = History.open(opened).target(number_of(version))
    sizes = payload_sizes(opened, at.manifest)
    tensors = [_tensor(entry, sizes) for entry in at.manifest.tensors]
    if as_json:
        output.show_json({**_summary(at), "tensors": tensors})
        return
    summary = _summary(at)
    output.show_table(
        f"version {at.version} ({summary['kind']}) of run {at.manifest.run_id}",
        ("tensor", "dtype", "shape", "encoding", "changed", "density", "bytes"),
        [
            (
                row["name"],
                row["dtype"],
                "x".join(map(str, row["shape"])),
                "unchanged" if row["encoding"] is None else row["encoding"],
                "" if row["changed"] is None else f"{row['changed']:,}",
                "" if row["density"] is None else f"{row['density']:.3%}",
                f"{row['payload_bytes']:,}",
            )
            for row in tensors
        ],
        caption=f"{summary['tensors']} of {len(tensors)} tensors, "
        f"{output.size(summary['payload_bytes'])} in {summary['parts']} parts, "
        f"base {summary['base_version']}, fingerprint {summary['fingerprint']}",
    )


def _summary(at: HeldVersion) -> dict[str, Any]:
    report = report_of(at)
    return {
        "version": at.version,
        "kind": report.kind,
        "base_version": at.manifest.base_version,
        "epoch": at.manifest.epoch,
        "encoding": at.manifest.encoding,
        "encodings": sorted({e.encoding for e in at.manifest.tensors if e.encoding is not None}),
        "tensors": report.tensors,
        "parts": len(at.manifest.parts),
        "changed": report.changed,
        "total": report.total,
        "density": report.density,
        "payload_bytes": report.payload_bytes,
        "full_bytes": report.full_bytes,
        "fingerprint": at.manifest.fingerprint.hex(),
        "manifest_sha256": at.sha256,
    }


def _tensor(entry: TensorEntry, sizes: Mapping[str, int]) -> dict[str, Any]:
    units = entry.meta.unit_count
    return {
        "name": entry.meta.name,
        "dtype": entry.meta.dtype,
        "shape": list(entry.meta.shape),
        "encoding": entry.encoding,
        "changed": entry.changed,
        "density": entry.changed / units if entry.changed is not None and units else None,
        "payload_bytes": sizes.get(entry.meta.name, 0),
        "fingerprint": entry.fingerprint.hex(),
    }


COMMANDS = (publish, pull, log, show)
