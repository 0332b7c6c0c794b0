"""The benchmark measures work that is really done; what it says of speed is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from syncline import bench, codecs, kernels
from syncline.bench import codecs as bench_codecs
from syncline.bench import kernels as bench_kernels
from syncline.bench import transport_ends as bench_transports
from syncline.cli import main
from syncline.errors import CodecError, ConfigError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codecs, "_UNITS", 1 << 16)
    monkeypatch.setattr(bench_kernels, "WINDOW_UNITS", 1 << 14)
    monkeypatch.setattr(bench_kernels, "_WINDOWS", 2)


def test_every_codec_is_measured_against_the_bound() -> None:
    rows = bench.bench_codecs(0.01)
    assert [row.name for row in rows] == list(codecs.NAMES)
    for row in rows:
        assert row.payload_bytes >= row.bound_bytes > 0
        assert row.encode_bytes_per_s > 0


def test_every_kernel_is_measured_against_the_roof() -> None:
    roof, rows = bench.bench_kernels(0.01)
    assert roof > 0
    assert len({row.name for row in rows}) == len(rows) >= 9
    assert all(row.nbytes > 0 and row.seconds > 0 and row.of_roof > 0 for row in rows)


def test_a_codec_that_gives_other_bits_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "scatter", lambda target, offsets, bits: None)
    with pytest.raises(CodecError, match="did not come back bit for bit"):
        bench.bench_codecs(0.01)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"density", "read_bytes_per_s", "kernels", "codecs"}
    main(["bench"])
    assert "of the roof" in capsys.readouterr().out


def test_the_trace_of_a_run_that_overlaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", "2")
    path = tmp_path / "out.json"
    main(["bench", "--trace", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["operations"]] == ["publish", "sync"]
    for row in found["operations"]:
        assert row["threads"] == 2
        assert 0 < row["overlap_s"] <= row["wall_s"] <= row["busy_s"] + row["wall_s"]
    events = json.loads(path.read_text())["traceEvents"]
    assert {"diff", "encode", "put", "fetch", "decode"} <= {event["name"] for event in events}
    main(["bench", "--trace", str(path)])
    assert "ui.perfetto.dev" in capsys.readouterr().out


@pytest.mark.parametrize("name", bench_transports.NAMES)
def test_every_transport_is_swept_beside_a_bare_loop(name: str) -> None:
    if name == "collective":
        pytest.importorskip("torch")
    buckets = (64 << 10, 256 << 10)
    rows = bench.bench_transports(1_000_003, buckets=buckets, runs=1, transports=[name])
    assert [row.bucket_bytes for row in rows] == list(buckets)
    for row in rows:
        assert (row.transport, row.nbytes) == (name, 1_000_003)
        assert row.seconds > 0
        assert row.bare_s > 0
        assert row.of_bare == pytest.approx(row.bare_s / row.seconds)
        assert row.peak_bytes >= 0


def test_a_transport_that_is_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected some of shared-memory"):
        bench.bench_transports(transports=["carrier pigeon"])


def test_transports_are_printed_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        bench.TransportFigures(name, size, 1 << 20, 0.2, 0.1, 4 * size)
        for name in ("store", "peers")
        for size in (1 << 18, 1 << 20)
    ]
    monkeypatch.setattr(bench, "bench_transports", lambda *_, **__: rows)
    target = tmp_path / "transports.png"
    main(["bench", "transports", "--json", "--picture", str(target)])
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [row["of_bare"] for row in figures] == [0.5] * 4
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    main(["bench", "transports"])
    assert "50%" in capsys.readouterr().out
