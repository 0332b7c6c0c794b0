"""Let `python -m syncline.cli` be the command `syncline`."""

from syncline.cli import main

main()
