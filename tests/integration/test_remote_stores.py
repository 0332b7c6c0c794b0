"""Whole runs over an S3 server and what stands beside it: the command line, plain HTTP, a foreign layout, killed publishers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from faulty_proxy import FaultyProxy
from s3_server import KEYS, S3Server, environment, s3_service
from syncline import CheckpointSource, MemoryEngine, Publisher, Receiver, open_store
from syncline.errors import (
    ConfigError,
    FormatError,
    StoreError,
    TransportUnavailableError,
    VersionConflictError,
)
from syncline.stores import HttpStore, LaggingStore, ObjectStore
from syncline.stores.writes import LEASE, Leased, lease_on

Run = Callable[..., tuple[int, str, str]]
GOLDEN = Path(__file__).parents[1] / "golden" / "slime"


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in environment(s3_server.url).items():
        monkeypatch.setenv(name, value)
    return s3_server


def weights(seed: int, size: int = 1000) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"a": rng.standard_normal(size).astype(np.float32), "b": np.arange(3, dtype=np.int64)}


def test_every_command_takes_a_url(s3: S3Server, s3_prefix: str, run: Run, tmp_path: Path) -> None:
    url = f"s3://bucket/{s3_prefix}"
    first, second = weights(1), weights(1)
    second["a"][::50] += 1
    for number, tensors in enumerate((first, second), 1):
        save_file(tensors, tmp_path / f"{number}.safetensors")
        status, _, err = run("publish", url, tmp_path / f"{number}.safetensors", "--json")
        assert status == 0, err
    for command in (
        ("pull", url, tmp_path / "engine"),
        ("log", url),
        ("show", url, "2"),
        ("fsck", url),
        ("verify", url, tmp_path / "engine"),
    ):
        status, _, err = run(*command, "--json")
        assert status == 0, err
    found = {}
    for path in (tmp_path / "engine").glob("*.safetensors"):
        found |= load_file(path)
    assert all(np.array_equal(found[name], second[name]) for name in second)


class Ranges(SimpleHTTPRequestHandler):
    """Python's own file server, and single ranges of RFC 9110."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        content = path.read_bytes()
        start, stop = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1) + 1
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        self.end_headers()
        self.wfile.write(content[start:stop])


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The URL under which a plain web server shows a temporary directory."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_run_is_read_from_a_web_server(web: str, tmp_path: Path) -> None:
    wanted = weights(1)
    publisher = Publisher(open_store(tmp_path / "run"))
    publisher.publish(wanted)
    store = open_store(f"{web}/run")
    assert isinstance(store, HttpStore)
    engine = MemoryEngine()
    Receiver(store, engine).sync()
    wanted["a"][5] += 1
    publisher.publish(wanted)
    assert Receiver(store, engine).sync().version == 2
    assert np.array_equal(engine.view("a").view(np.float32), wanted["a"])
    assert store.get("HEAD.json", 10**6, 10**7) == b""
    for write in (
        lambda: store.put("a", [b"x"]),
        lambda: store.compare_and_swap("HEAD.json", None, b"x"),
        lambda: store.delete("HEAD.json"),
    ):
        with pytest.raises(StoreError, match="read only"):
            write()
    with pytest.raises(TransportUnavailableError, match="lists nothing"):
        store.list()


def test_what_a_web_server_lacks_is_named(web: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"no HEAD.json in {web}/nothing"):
        Receiver(open_store(f"{web}/nothing"), MemoryEngine()).sync()
    Publisher(open_store(tmp_path / "run")).publish(weights(1))
    next((tmp_path / "run").rglob("*1.safetensors")).unlink()
    with pytest.raises(FormatError, match="missing"):
        Receiver(open_store(f"{web}/run"), MemoryEngine()).sync()


def test_a_slime_directory_is_followed_in_a_bucket(s3: S3Server, s3_prefix: str) -> None:
    store = open_store(f"s3://bucket/{s3_prefix}")
    for path in (GOLDEN / "xor-xxh3-128").rglob("*.*"):
        store.put(path.relative_to(GOLDEN / "xor-xxh3-128").as_posix(), [path.read_bytes()])
    engine = MemoryEngine()
    assert Receiver(store, engine).sync("000002").layout == "slime"
    expected = CheckpointSource(GOLDEN / "expected-000002.safetensors")
    assert {name: engine.view(name).tobytes() for name in engine.tensors()} == {
        meta.name: bits.tobytes() for meta, bits in expected.tensors()
    }


KILLED = """
import sys
import numpy as np
from syncline import Publisher, open_store
from syncline.stores import ObjectStore
from s3_server import s3_service

store = ObjectStore(s3_service(sys.argv[1], sys.argv[2]), one_request_bytes=1 << 20, writes="conditional")
publisher = Publisher(store)
publisher.publish({"a": np.zeros(9 << 20, np.float32)})
"""


def test_a_publisher_killed_in_the_middle_of_a_multipart_upload(
    s3: S3Server, s3_prefix: str, faulty_proxy: FaultyProxy
) -> None:
    """Nothing of its version is seen, and the next publisher writes the same number."""
    faulty_proxy.pause_s = 0.3
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, faulty_proxy.url, s3_prefix],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    while faulty_proxy.count("PUT", "partNumber=2") == 0 and process.poll() is None:
        pass
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    faulty_proxy.pause_s = 0.0
    store = ObjectStore(s3_service(s3.url, s3_prefix), one_request_bytes=1 << 20)
    assert [info.key for info in store.list()] == ["HEAD.json"]
    wanted = weights(3, 1 << 20)
    assert Publisher(store).publish(wanted).version == 1
    engine = MemoryEngine()
    Receiver(store, engine).sync()
    assert np.array_equal(engine.view("a").view(np.float32), wanted["a"])


def test_a_service_that_ignores_conditions_is_found_out(s3_prefix: str) -> None:
    with S3Server(ignore_conditions=True) as server:
        server.make_bucket("bucket")
        service = s3_service(server.url, s3_prefix)
        store = ObjectStore(service)
        assert not store.has_conditions
        store.compare_and_swap("HEAD.json", None, b"1")
        with pytest.raises(VersionConflictError):
            store.compare_and_swap("HEAD.json", b"0", b"2")
        assert b'"token":' in store._service.read(LEASE)[0]
        assert [info.key for info in store.list()] == ["HEAD.json"]


def test_a_publish_to_a_service_without_conditions_waits_for_the_lease_once(s3_prefix: str) -> None:
    """It waited for every object; each wait is a second."""
    with S3Server(ignore_conditions=True) as server, FaultyProxy(server.url) as proxy:
        server.make_bucket("bucket")
        store = ObjectStore(s3_service(proxy.url, s3_prefix))
        assert not store.has_conditions
        waits: list[float] = []
        lease = lease_on(store._service, lasts_s=600.0)
        lease._sleep = waits.append  # nobody else writes
        store._writes = Leased(store._service, lease)
        publisher = Publisher(store, part_bytes=400)
        wanted = {f"layer.{i}": np.full(100, i, np.float32) for i in range(10)}
        for version in (1, 2):
            waits.clear()
            wanted = {name: value + 1 for name, value in wanted.items()}
            before = proxy.count("PUT", "weight_v")
            assert publisher.publish(wanted).version == version
            assert proxy.count("PUT", "weight_v") - before == 12  # parts, index, manifest
            assert waits == [1.0]
        engine = MemoryEngine()
        Receiver(ObjectStore(s3_service(server.url, s3_prefix)), engine).sync()
        assert all(np.array_equal(engine.view(n).view(np.float32), a) for n, a in wanted.items())


def test_a_service_with_conditions_is_believed(s3: S3Server, s3_prefix: str) -> None:
    store = ObjectStore(s3_service(s3.url, s3_prefix))
    assert store.has_conditions
    assert store.list() == []


def test_a_store_that_was_written_under_a_lease_stays_so(s3: S3Server, s3_prefix: str) -> None:
    ObjectStore(s3_service(s3.url, s3_prefix), writes="lease").put("a", [b"x"])
    assert not ObjectStore(s3_service(s3.url, s3_prefix)).has_conditions


def test_no_secret_is_shown(s3: S3Server, s3_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"s3://bucket/{s3_prefix}?X-Amz-Signature=hidden-signature")
    shown = f"{store} {store!r}"
    monkeypatch.setenv("SYNCLINE_STORE_DEADLINE_S", "0")
    for url in (
        "http://me:hidden-password@127.0.0.1:9/run?sig=hidden-signature",
        "az://account/container/run?sig=hidden-signature",
        "hf://hidden-password@buckets/me",
    ):
        try:
            opened = open_store(url)
            shown += f"{opened} {opened!r}"
            opened.get("HEAD.json")
        except (StoreError, ConfigError) as error:
            shown += f" {error} {error.__cause__}"
    assert "hidden" not in shown
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in shown


def test_a_lag_is_set_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_STORE_VISIBLE_WITHIN_S", "30")
    store = open_store(tmp_path)
    assert isinstance(store, LaggingStore)
    assert store.visible_within_s == 30
    monkeypatch.setenv("SYNCLINE_STORE_VISIBLE_WITHIN_S", "soon")
    with pytest.raises(ConfigError, match="SYNCLINE_STORE_VISIBLE_WITHIN_S"):
        open_store(tmp_path)
