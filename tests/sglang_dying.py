"""Processes that are killed on the way: `sglang_dying.py follower URL ROOT STEP`, `sglang_dying.py trainer ROOT`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import syncline
from syncline.engines import CheckpointDir
from syncline.sglang.control import SglangHttp
from syncline.sglang.server import SglangServer
from syncline.stores import FilesystemStore


def die() -> None:
    """End this process as a crash would."""
    os.kill(os.getpid(), signal.SIGKILL)


def follower(url: str, root: Path, step: str) -> None:
    """Follow, and die when a commit has reached a step."""
    server = SglangServer(
        SglangHttp(url),
        syncline.open_store(str(root / "run")),
        CheckpointDir(root / "model"),
        root / "staging",
        reached=lambda reached: die() if reached == step else None,
    )
    server.sync()


class DyingStore(FilesystemStore):
    """A store whose user dies before a version's manifest is written, when its parts are."""

    def put(self, key: str, *given: object, **named: object) -> None:
        if key.endswith("manifest.json"):
            die()
        super().put(key, *given, **named)  # type: ignore[arg-type]


def trainer(root: Path) -> None:
    """Publish the weights in the checkpoint, all of them changed, and die."""
    from safetensors.torch import load_file

    weights = load_file(root / "base" / "model.safetensors")
    syncline.Publisher(DyingStore(root / "run")).publish(
        {name: -tensor for name, tensor in weights.items()}
    )


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    if kind == "follower":
        follower(words[0], Path(words[1]), words[2])
    else:
        trainer(Path(words[0]))
