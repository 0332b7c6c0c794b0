"""Mooncake and NIXL through the contract suite of peer memory, and engines that join over them, in the environment that has them.

`make peers-env` makes it; part of `make test`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("SYNCLINE_PEERS_ENV", ROOT / ".venvs" / "peers"))

SUITES = (
    ROOT / "tests" / "contracts" / "test_peer_contract.py",
    ROOT / "tests" / "unit" / "hosts" / "test_transports.py",
)

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / ".made-from").exists(),
    reason="Mooncake and NIXL are not installed; run make peers-env",
)


def test_the_environment_is_the_one_that_is_asked_for():
    listed = Path(__file__).with_name("packages.txt").read_text()
    assert (ENVIRONMENT / ".made-from").read_text().startswith(listed), "run make peers-env"


@pytest.mark.parametrize("kind", ["mooncake", "nixl"])
def test_the_contract_holds(kind):
    python = ENVIRONMENT / "bin" / "python"
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs")
    done = subprocess.run(
        [python, *options, "-k", kind, *SUITES],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    if "libibverbs" in done.stdout:
        pytest.skip("Mooncake needs Debian's libibverbs1 libnl-3-200 libnl-route-3-200")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
