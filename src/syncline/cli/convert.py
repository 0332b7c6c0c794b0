"""`convert`: a run moved from one layout to another."""

from __future__ import annotations

from pathlib import Path

import click

from syncline import interchange
from syncline.cli import foreign, output
from syncline.cli.options import json_option
from syncline.errors import ConfigError
from syncline.stores import open_store
from syncline.sync import convert as convert_run
from syncline.sync.layout import AUTO, CHOICES

_existing = click.Path(exists=True, path_type=Path)


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--to",
    required=True,
    type=click.Choice((interchange.SYNCLINE, *interchange.NAMES)),
    help="Layout to write.",
)
@click.option(
    "--from",
    "layout",
    type=click.Choice(CHOICES),
    default=AUTO,
    show_default=True,
    help="Layout of SRC.",
)
@click.option("--base", type=_existing, help="Checkpoint that the run began with.")
@click.option("--encoding", metavar="NAME", help="Of deltas in DST.")
@click.option("--checksum", metavar="NAME", help="Of deltas in DST, where the layout has a choice.")
@click.option(
    "--work-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where copies of the weights may lie meanwhile.",
)
@json_option
def convert(
    source: str,
    target: str,
    to: str,
    layout: str,
    base: Path | None,
    encoding: str | None,
    checksum: str | None,
    work_dir: Path | None,
    as_json: bool,
) -> None:
    """Write every version in SRC into DST, which must be empty, in another layout; prove each.

    Each version is read back from DST and compared, bit for bit.
    """
    _check_apart(source, target)
    with output.progress("converting", is_quiet=as_json) as observe:
        report = convert_run(
            open_store(source),
            open_store(target),
            to,
            layout=layout,
            base=base,
            encoding=encoding,
            checksum=checksum,
            work_dir=work_dir,
            observe=observe,
        )
    if as_json:
        output.show_json(report.as_dict())
        return
    output.show_table(
        f"{source} ({report.source}) converted to {target} ({report.target})",
        ("version", "becomes", "kind", "changed", "bytes", "bytes there"),
        [
            (
                item.source,
                item.target,
                item.kind,
                "" if item.kind == "full" else f"{item.changed:,}",
                output.size(item.source_bytes),
                output.size(item.target_bytes),
            )
            for item in report.versions
        ],
        caption=f"{len(report.versions)} versions, each read back and the same bit for bit, in "
        f"{output.seconds(report.seconds)}",
    )
    foreign.show_missing(report.missing)


def _check_apart(source: str, target: str) -> None:
    """Check that neither directory lies in the other, where it would look like a part of it.

    Raises:
        ConfigError: one does.
    """
    if "://" in source or "://" in target:
        return
    old, new = Path(source).resolve(), Path(target).resolve()
    if old == new or old in new.parents or new in old.parents:
        raise ConfigError(
            f"DST {target}: expected a directory apart from SRC {source}, found one inside the other"
        )


COMMANDS = (convert,)
