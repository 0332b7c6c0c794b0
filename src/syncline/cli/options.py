"""Arguments and options that several commands share."""

from __future__ import annotations

import click

store_argument = click.argument("store", metavar="STORE")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
