"""Write `tests/golden/`: payloads, whole runs and bad inputs, out of nothing but fixed numbers.

    python scripts/make_golden.py [DIRECTORY]

The files pin the format: a change that alters one of them changes what earlier releases wrote. They
are made by this script only, never by hand.

    golden.json            the zstd release that the frames came out of
    payloads/CASE.json     a tensor before and after, and its payload in every encoding
    foreign/CASE.json      a legal payload that Syncline itself does not write
    runs/NAME/             a whole run; runs/NAME.expected/ has the tensors of every version
    layouts/NAME/          versions as another project's publisher leaves them, and what they stand for
    slime/NAME/            a directory in the slime layout, for every encoding and checksum
    bad/cases.json         inputs that must be refused, and what the refusal says
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import zstandard
from golden_bad import write_bad
from golden_layouts import write_layouts
from golden_payloads import write_foreign, write_payloads
from golden_runs import write_runs
from golden_slime import write_slime

from syncline.format import strict_json

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
MADE = ("payloads", "foreign", "runs", "slime", "layouts", "bad")


def main(directory: Path) -> None:
    """Replace the golden files in a directory; other files there are left alone."""
    for name in MADE:
        shutil.rmtree(directory / name, ignore_errors=True)
        (directory / name).mkdir(parents=True)
    release = ".".join(map(str, zstandard.ZSTD_VERSION))
    (directory / "golden.json").write_bytes(strict_json.dump({"zstd": release}))
    write_payloads(directory / "payloads")
    write_foreign(directory / "foreign")
    write_runs(directory / "runs")
    write_layouts(directory / "layouts")
    write_slime(directory / "slime")
    write_bad(directory / "bad", directory / "runs")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)
