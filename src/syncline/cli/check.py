"""`verify`, `fsck` and `diff`: what lies at rest, compared bit by bit."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import click

from syncline import interchange
from syncline.cli import foreign, output
from syncline.cli.options import json_option, layout_option, store_argument
from syncline.engines.checkpoint_dir import read_state
from syncline.stores import open_store
from syncline.sync.compare import Comparison, compare
from syncline.sync.followed import number_of
from syncline.sync.foreign_check import check_foreign
from syncline.sync.fsck import check_store
from syncline.sync.layout import foreign_layout
from syncline.sync.verify import verify_directory
from syncline.version import HeldVersion

_existing = click.Path(exists=True, path_type=Path)


@click.command()
@store_argument
@click.argument("directory", type=_existing)
@click.option("--version", metavar="VERSION", help="Default: the current version.")
@layout_option
@json_option
def verify(store: str, directory: Path, version: str | None, layout: str, as_json: bool) -> None:
    """Check that DIRECTORY holds exactly a version in STORE; name every tensor that differs."""
    found = foreign_layout(open_store(store), layout)
    if found is not None:
        if not foreign.show_verdict(open_store(store), found, directory, version, as_json=as_json):
            sys.exit(1)
        return
    with output.progress("verifying", is_quiet=as_json) as observe:
        at, mismatches = verify_directory(open_store(store), directory, number_of(version), observe)
    if as_json:
        output.show_json(
            {
                "version": at.version,
                "identical": not mismatches,
                "mismatches": [asdict(item) for item in mismatches],
            }
        )
    elif mismatches:
        output.show_mismatches(f"{directory} is not version {at.version}", mismatches)
        output.show_line(_what_it_holds(directory, at))
    else:
        output.show_line(
            f"{directory} holds exactly version {at.version}: {len(at.manifest.tensors)} tensors, "
            f"{output.size(at.manifest.model_bytes)}"
        )
    if mismatches:
        sys.exit(1)


def _what_it_holds(directory: Path, at: HeldVersion) -> str:
    """Tell a directory that is behind from one that was damaged, by what it says of itself."""
    state = read_state(directory)
    if state is None:
        return "Syncline does not keep this directory: `pull --adopt` takes it over"
    held = state.held
    if held is not None and held.sha256 != at.sha256:
        return f"by its own account it holds version {held.version}: `pull` brings it to another"
    return "`pull --repair` puts right what differs"


@click.command()
@store_argument
@click.option("--deep", is_flag=True, help="Also rebuild every version and prove its fingerprints.")
@layout_option
@json_option
def fsck(store: str, deep: bool, layout: str, as_json: bool) -> None:
    """Check every digest, chain and pointer in STORE."""
    opened = open_store(store)
    found = foreign_layout(opened, layout)
    with output.progress("checking", is_quiet=as_json) as observe:
        if found is None:
            versions, findings = check_store(opened, deep=deep, observe=observe)
        else:
            versions, findings = check_foreign(opened, found, deep=deep, observe=observe)
    faults = sum(item.is_fault for item in findings)
    if as_json:
        output.show_json(
            {
                "layout": interchange.SYNCLINE if found is None else found.name,
                "versions": versions,
                "ok": not faults,
                "findings": [asdict(item) for item in findings],
            }
        )
    else:
        for item in findings:
            output.show_line(
                f"{'fault' if item.is_fault else 'note'}: {item.where}: {item.problem}"
            )
        kind = "" if found is None else f" in the layout {found.name}"
        output.show_line(f"{versions} versions{kind} checked, {faults} faults")
        if faults and found is None:
            output.show_line(
                "Engines go round a damaged version by a full one: syncline publish STORE CHECKPOINT --base "
                "CHECKPOINT --full, with a checkpoint that holds the newest version"
            )
    if faults:
        sys.exit(1)


@click.command()
@click.argument("old", type=_existing)
@click.argument("new", type=_existing)
@json_option
def diff(old: Path, new: Path, as_json: bool) -> None:
    """Compare two checkpoints: density, steps in ulps, predicted bytes for every encoding.

    A directory of versions that others wrote stands for its newest version.
    """
    with output.progress("comparing", is_quiet=as_json) as observe, ExitStack() as opened:
        before = foreign.opened_source(old, opened, is_quiet=as_json)
        after = foreign.opened_source(new, opened, is_quiet=as_json)
        result = compare(before, after, observe)
    if as_json:
        output.show_json(result.as_dict())
        return
    _show_tensors(result)
    output.show_table(
        "steps between neighbouring representable values",
        ("step", "elements", "share"),
        [
            (name, f"{count:,}", f"{count / max(1, result.changed):.2%}")
            for name, count in result.steps.items()
        ],
    )
    predicted = result.predicted_bytes()
    output.show_table(
        "predicted payload",
        ("encoding", "bytes", "times smaller than full", "bytes per changed element"),
        [
            (
                name,
                output.size(nbytes),
                f"{result.full_bytes / max(1, nbytes):.1f}",
                f"{nbytes / result.changed:.2f}" if result.changed else "",
            )
            for name, nbytes in sorted(predicted.items(), key=lambda item: item[1])
        ],
    )
    encoding, reason = result.recommendation()
    output.show_line(f"recommended: --encoding {encoding}. {reason}")


def _show_tensors(result: Comparison) -> None:
    ranked = sorted(result.tensors, key=lambda item: item.changed, reverse=True)
    output.show_table(
        "density by tensor",
        ("tensor", "dtype", "elements", "changed", "density"),
        [
            (
                item.meta.name,
                item.meta.dtype,
                f"{item.meta.unit_count:,}",
                f"{item.changed:,}",
                f"{item.density:.3%}",
            )
            for item in ranked
        ],
        caption=f"in all: {result.changed:,} of {result.total:,} elements, {result.density:.3%}",
    )


COMMANDS = (verify, fsck, diff)
