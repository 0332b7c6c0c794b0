"""Peak memory is bounded by the snapshot and the buckets, whatever the size of the model."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CHILD = textwrap.dedent(
    """
    import json, resource, sys
    import numpy as np
    from safetensors.numpy import load_file
    from syncline import CheckpointDir, CheckpointSource, FilesystemStore, Publisher, Receiver, convert

    job, root, encoding = sys.argv[1:]
    store = FilesystemStore(root + "/store")

    def peak_bytes():
        # VmHWM counts mapped file pages too; anonymous memory is what a process really takes.
        fields = dict(line.split(":") for line in open("/proc/self/status"))
        return int(fields["RssAnon"].split()[0]) * 1024

    import threading, time
    worst, stop = peak_bytes(), threading.Event()

    def watch():
        global worst
        while not stop.wait(0.002):
            worst = max(worst, peak_bytes())

    start = peak_bytes()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    if job == "publish":
        publisher = Publisher(store, encoding=encoding, snapshot_dir=root + "/snapshot",
                              memory_bytes=8 << 20)
        publisher.publish(CheckpointSource(root + "/new"))
    elif job == "convert":
        convert(store, FilesystemStore(root + "/out"), encoding, work_dir=root)
    else:
        Receiver(store, CheckpointDir(root + "/engine")).sync()
    stop.set()
    watcher.join()
    print(json.dumps({"extra_bytes": worst - start}))
    """
)

MODEL_BYTES = 384 << 20
MAKE = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import numpy as np
    from safetensors.numpy import save_file

    root = Path(sys.argv[1])
    rng = np.random.default_rng(0)
    w = {f"layer.{i}": rng.integers(0, 60000, (64 << 20) // 2, np.uint16) for i in range(6)}
    for name in ("old", "new"):
        (root / name).mkdir()
        save_file(w, root / name / "model.safetensors")
        for array in w.values():
            array[rng.integers(0, array.size, array.size // 100)] += 1
    """
)


def child(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["auto", "overwrite", "xor", "planes"])
def test_extra_memory_does_not_grow_with_the_model(encoding: str, tmp_path: Path) -> None:
    from syncline import (
        CheckpointDir,
        CheckpointSource,
        Publisher,
        Receiver,
        open_store,
    )

    child(MAKE, str(tmp_path))
    store = open_store(tmp_path / "store")
    Publisher(store, snapshot_dir=tmp_path).publish(CheckpointSource(tmp_path / "old"))
    Receiver(store, CheckpointDir(tmp_path / "engine")).sync()
    for job in ("publish", "pull"):
        extra = json.loads(child(CHILD, job, str(tmp_path), encoding))["extra_bytes"]
        assert extra < MODEL_BYTES / 3, f"{job}: {extra / 1e6:.0f} MB"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["slime", "fireworks", "syncline"])
def test_extra_memory_of_a_conversion_does_not_grow_with_the_model(
    layout: str, tmp_path: Path
) -> None:
    from syncline import CheckpointSource, Publisher, open_store

    child(MAKE, str(tmp_path))
    publisher = Publisher(open_store(tmp_path / "store"), snapshot_dir=tmp_path)
    for name in ("old", "new"):
        publisher.publish(CheckpointSource(tmp_path / name))
    extra = json.loads(child(CHILD, "convert", str(tmp_path), layout))["extra_bytes"]
    assert extra < MODEL_BYTES / 3, f"{layout}: {extra / 1e6:.0f} MB"
