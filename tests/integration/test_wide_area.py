"""A small delta over a slow link between two network namespaces, by the benchmark's own code."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.slow


def can_make_links() -> bool:
    """Tell whether this process may make namespaces, a veth pair and a token bucket."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"syncline-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    try:
        bucket = ("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", "tbf")
        limits = ("rate", "100mbit", "burst", "256kb", "latency", "100ms")
        return not subprocess.run([*bucket, *limits], capture_output=True, check=False).returncode
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.skipif(not can_make_links(), reason="needs root, iproute2 and sch_tbf")
def test_a_delta_over_a_slow_link_takes_a_fraction_of_a_full_version() -> None:
    import wide_area

    found = wide_area.measure(
        argparse.Namespace(
            rates_mbit=[20],
            rounds=2,
            pause_ms=10,
            share=0.01,
            megabytes=20,
            part_mebibytes=4096,
            store_beside="trainer",
        )
    )
    delta = found["deltas"][0]
    assert 0 < delta["delta_bytes"] * 20 < found["full_bytes"]
    # No link moves bytes faster than its rate: the token bucket held, so the figures mean something.
    assert found["full_over_nominal"] > 0.9
