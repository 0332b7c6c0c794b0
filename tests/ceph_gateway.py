"""Ceph's RADOS gateway with one monitor and one OSD in memory, all on loopback, as a context manager."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Self

from s3_server import KEYS

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "setpriv")
CONFIG = """
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon}]
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
run dir = {here}
admin socket =
log file = {here}/$name.log
public addr = 127.0.0.1
cluster addr = 127.0.0.1
mon data = {here}/mon
osd data = {here}/osd
osd objectstore = memstore
memstore device bytes = 8589934592
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{http}
rgw data = {here}/rgw
rgw gc obj min wait = 1
rgw gc processor period = 1
"""


def is_installed() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


class CephGateway:
    """The gateway; `url` answers S3 for the keys of `s3_server.KEYS`."""

    def __enter__(self) -> Self:
        self._here = Path(tempfile.mkdtemp(prefix="ceph-gateway-"))
        self._running: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running):
            process.kill()
            process.wait()
        shutil.rmtree(self._here, ignore_errors=True)

    def _start(self) -> None:
        fsid, mon, http = str(uuid.uuid4()), _free_port(), _free_port()
        for name in ("mon", "osd", "rgw"):
            (self._here / name).mkdir()
        self._config = self._here / "ceph.conf"
        self._config.write_text(CONFIG.format(fsid=fsid, mon=mon, http=http, here=self._here))
        monmap, osd = self._here / "monmap", str(uuid.uuid4())
        self._call(
            "monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon}]", monmap
        )
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._run("ceph-mon", "-i", "a", "-f")
        self._call("ceph", "--connect-timeout", "60", "osd", "new", osd)
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._run("ceph-osd", "-i", "0", "-f")
        self._call(
            "radosgw-admin", "-n", "client.rgw", "user", "create", "--uid=test", "--display-name=test",
            f"--access-key={KEYS['AWS_ACCESS_KEY_ID']}",
            f"--secret-key={KEYS['AWS_SECRET_ACCESS_KEY']}",
        )  # fmt: skip
        self._run("radosgw", "-n", "client.rgw", "-f")
        self.url = f"http://127.0.0.1:{http}"
        self._wait()

    def make_bucket(self, name: str) -> None:
        """Make an empty bucket."""
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket=name)
        client.close()

    def _wait(self) -> None:
        end = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(self.url, timeout=5):
                    return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def _call(self, *command: object) -> None:
        subprocess.run(
            [*map(str, command), "-c", str(self._config)],
            check=True,
            timeout=120,
            capture_output=True,
        )

    def _run(self, *command: str) -> None:
        """Start a server that ends with this process, however that ends."""
        self._running.append(
            subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command, "-c", str(self._config)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
