"""Arguments and options that several commands share."""

from __future__ import annotations

import click

from syncline.sync.layout import AUTO, CHOICES

store_argument = click.argument("store", metavar="STORE")
layout_option = click.option(
    "--layout",
    type=click.Choice(CHOICES),
    default=AUTO,
    show_default=True,
    help="Whose versions lie in STORE; auto: look.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
