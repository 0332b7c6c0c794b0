"""Publish and receive one step of case C: Syncline beside what pip installs, in one process and one run.

Run it with the environment of `make cross-env`, into which zipnn is installed too:

    .venvs/cross/bin/python benchmarks/rivals.py [--runs 5] [--json]

Every rival gets the same weights, moved by the same steps, and 2 threads where it has threads. Times are
medians over the runs, which go round through all rivals; "publish" is from weights in memory to what is
stored, "receive" from there to checked weights. Rows marked (re-made) are the layout of a project, written
here, since the project itself cannot be installed without its framework.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

THREADS = 2
os.environ.setdefault("SYNCLINE_THREADS", str(THREADS))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cross"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import xxhash  # noqa: E402
import zstandard  # noqa: E402
from bench_sync import CaseSource  # noqa: E402
from machine import machine  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from safetensors.torch import save_file as save_torch_file  # noqa: E402

import syncline  # noqa: E402
from syncline import kernels  # noqa: E402

Weights = dict[str, np.ndarray]


class Rival:
    """One way to get a step across: `publish` and `receive` are timed, `check` looks at the result."""

    name = ""
    payload_bytes = 0

    def __init__(self, base: Weights, directory: Path) -> None:
        self.held = {name: bits.copy() for name, bits in base.items()}
        self.snapshot = {name: bits.copy() for name, bits in base.items()}
        self.directory = directory

    def publish(self, weights: Weights) -> None:
        raise NotImplementedError

    def receive(self) -> None:
        raise NotImplementedError

    def weights(self) -> Mapping[str, np.ndarray]:
        """Return what the receiving side holds."""
        return self.held


class Syncline(Rival):
    """Ours, through the store that is given."""

    encoding = "packed"

    def __init__(self, base: Weights, directory: Path) -> None:
        self.name = f"syncline {self.encoding}"
        self._store = syncline.FilesystemStore(directory / "run")
        self._publisher = syncline.Publisher(self._store, encoding=self.encoding)
        self._publisher.publish(_bf16(base))
        self._engine = syncline.MemoryEngine()
        self._receiver = syncline.Receiver(self._store, self._engine)
        self._receiver.sync()

    def publish(self, weights: Weights) -> None:
        self.payload_bytes = self._publisher.publish(_bf16(weights)).payload_bytes

    def receive(self) -> None:
        self._receiver.sync()

    def weights(self) -> Mapping[str, np.ndarray]:
        return {name: self._engine.view(name) for name in self._engine.tensors()}


class SynclineTight(Syncline):
    encoding = "tight"


class SlimeXor(Rival):
    """Dense XOR, zstd level 1 and XXH3-128 a tensor, on a pool of threads, as slime's disk path does it."""

    name = "slime xor (re-made)"

    def publish(self, weights: Weights) -> None:
        def encode(name: str) -> tuple[str, np.ndarray, str]:
            flips = np.bitwise_xor(weights[name], self.snapshot[name])
            digest = xxhash.xxh3_128(weights[name].view(np.uint8)).hexdigest()
            np.copyto(self.snapshot[name], weights[name])
            frame = zstandard.ZstdCompressor(level=1).compress(flips.data)
            return name, np.frombuffer(frame, np.uint8), digest

        with ThreadPoolExecutor(THREADS) as pool:
            rows = list(pool.map(encode, weights))
        path = self.directory / "delta.safetensors"
        frames = {name: frame for name, frame, _ in rows}
        save_file(frames, path, {name: digest for name, _, digest in rows})
        self.payload_bytes = path.stat().st_size
        self._digests = {name: digest for name, _, digest in rows}

    def receive(self) -> None:
        frames = load_file(self.directory / "delta.safetensors")

        def apply(name: str) -> None:
            held = self.held[name]
            raw = zstandard.ZstdDecompressor().decompress(frames[name].data, held.nbytes)
            np.bitwise_xor(held, np.frombuffer(raw, held.dtype), out=held)
            if xxhash.xxh3_128(held.view(np.uint8)).hexdigest() != self._digests[name]:
                raise SystemExit(f"slime: {name} differs")

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(apply, frames))


class TorchIndices(Rival):
    """int32 positions and BF16 values by plain torch operations, as TRL's first patches hold them."""

    name = "torch int32 + bf16 (TRL v1 layout, re-made)"

    def publish(self, weights: Weights) -> None:
        rows = {}
        for name, bits in weights.items():
            new, old = _torch(bits), _torch(self.snapshot[name])
            places = (new != old).nonzero().squeeze(1)
            rows[f"{name}.indices"] = places.to(torch.int32).numpy()
            rows[f"{name}.values"] = new[places].numpy().view(np.uint16)
            old.copy_(new)
        save_file(rows, self.directory / "delta.safetensors")
        self.payload_bytes = (self.directory / "delta.safetensors").stat().st_size

    def receive(self) -> None:
        rows = load_file(self.directory / "delta.safetensors")
        for name, bits in self.held.items():
            places = torch.from_numpy(rows[f"{name}.indices"]).long()
            _torch(bits)[places] = torch.from_numpy(rows[f"{name}.values"].view(np.int16))


class SafetensorsFull(Rival):
    """All weights as one safetensors file."""

    name = "safetensors, all weights"

    def publish(self, weights: Weights) -> None:
        save_file(weights, self.directory / "full.safetensors")
        self.payload_bytes = (self.directory / "full.safetensors").stat().st_size

    def receive(self) -> None:
        for name, bits in load_file(self.directory / "full.safetensors").items():
            np.copyto(self.held[name], bits)


class ZipNN(Rival):
    """All weights through zipnn, which takes BF16 apart into byte planes."""

    name = "zipnn, all weights"

    def __init__(self, base: Weights, directory: Path) -> None:
        super().__init__(base, directory)
        from zipnn import ZipNN as Coder

        self._coder = Coder(input_format="byte", bytearray_dtype="bfloat16", threads=THREADS)

    def publish(self, weights: Weights) -> None:
        self._frames = {
            name: self._coder.compress(bytearray(bits.tobytes())) for name, bits in weights.items()
        }
        self.payload_bytes = sum(map(len, self._frames.values()))

    def receive(self) -> None:
        for name, frame in self._frames.items():
            raw = np.frombuffer(self._coder.decompress(frame), np.uint16)
            np.copyto(self.held[name], raw)


class ModelExpress(Rival):
    """modelexpress 0.7.0: its own publication method and its own local checkpoint, S3 being a directory."""

    name = "modelexpress 0.7.0"

    def __init__(self, base: Weights, directory: Path) -> None:
        import torch.distributed as dist
        from foreign_side import MODEL, DirectoryS3
        from modelexpress_rl import refit_pb2
        from modelexpress_rl.inference.receiver import (
            ObjectStorageGeneratorConfig,
            _LocalCheckpoint,
        )
        from modelexpress_rl.object_storage import ObjectStorageType
        from modelexpress_rl.train.methods.canonical_delta import CanonicalDeltaPublicationMethod
        from modelexpress_rl.utils import make_tensor_reader

        self.directory = directory
        seed = _save_checkpoint(base, directory / "seed")
        if not dist.is_initialized():
            group = f"file://{directory / 'group'}"
            dist.init_process_group("gloo", init_method=group, rank=0, world_size=1)
        self._target = target = refit_pb2.WeightVersion(model_name=MODEL)

        class Service:
            def GetWeightVersion(self, request: Any, timeout: float) -> Any:  # noqa: N802
                return refit_pb2.GetWeightVersionResponse(version=target)

        class Config:
            initial_base_version_id = "seed"
            uri_prefix = "s3://bucket"

        self._publishing = CanonicalDeltaPublicationMethod(
            config=Config,
            model_name=MODEL,
            service=Service,
            rpc_timeout_seconds=60.0,
            process_group=dist.group.WORLD,
            read_seed_tensor=make_tensor_reader(str(seed))[0],
            s3=DirectoryS3(str(directory)),
        )
        config = ObjectStorageGeneratorConfig(
            storage_type=ObjectStorageType.S3,
            initial_base_version_id="full",
            seed_checkpoint_path=str(seed),
            refit_checkpoint_dir=str(directory / "local"),
        )
        self._local = _LocalCheckpoint(
            model_name=MODEL, config=config, s3=DirectoryS3(str(directory))
        )
        self._local.initialize()
        self._version = "full"
        self._stage("full", None, base)

    def _stage(self, version: str, base_version: str | None, weights: Weights) -> None:
        from foreign_side import index_uri
        from modelexpress_rl import refit_pb2
        from modelexpress_rl.version import WeightVersionRef

        target = self._target
        target.uid = version
        target.object_storage.storage_type = refit_pb2.OBJECT_STORAGE_TYPE_S3
        target.object_storage.uri = index_uri(version)
        target.payload_format = refit_pb2.WEIGHT_PAYLOAD_FORMAT_FULL_HF_CHECKPOINT
        if base_version is not None:
            target.payload_format = refit_pb2.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA
            target.base_version_id = base_version
        ref = WeightVersionRef(version)
        tensors = [
            (name, _torch(bits).view(torch.bfloat16).reshape(-1)) for name, bits in weights.items()
        ]
        staged = self._publishing.stage(version=ref, hf_tensor_iter=[tensors])
        self._publishing.publish(version=ref, staged=staged)

    def publish(self, weights: Weights) -> None:
        self._before, self._version = self._version, f"uid-{time.monotonic_ns()}"
        self._stage(self._version, self._before, weights)
        files = (self.directory / self._version).glob("*.safetensors")
        self.payload_bytes = sum(path.stat().st_size for path in files)

    def receive(self) -> None:
        from foreign_side import index_uri
        from modelexpress_rl.inference.receiver import _S3Version
        from modelexpress_rl.train import WeightPayloadFormat

        step = _S3Version(
            version_id=self._version,
            base_version_id=self._before,
            payload_format=WeightPayloadFormat.XOR_DELTA,
            uri=index_uri(self._version),
        )
        prepared = self._local.prepare_chain((step,))
        self._path = Path(prepared.path)
        self._local.activate(prepared)

    def weights(self) -> Mapping[str, np.ndarray]:
        return _bits_of(self._path)


class CwTrain(Rival):
    """cwtrain 1.0.2: `write_delta` between two checkpoints on disk, and its weight mirror."""

    name = "cwtrain 1.0.2 (from checkpoints on disk)"

    def __init__(self, base: Weights, directory: Path) -> None:
        from cwtrain.hotload.mirror import WeightMirror

        self.directory = directory
        self._number = 1
        self._base = self._saved(base)
        self._mirror = WeightMirror.create(
            str(self._base), str(directory / "mirror"), version="000001"
        )

    def _saved(self, weights: Weights) -> Path:
        return _save_checkpoint(weights, self.directory / f"checkpoint{self._number}")

    def prepare(self, weights: Weights) -> None:
        """Save the checkpoint that `write_delta` reads; a trainer would have to, but it is not timed."""
        self._number += 1
        self._new = self._saved(weights)

    def publish(self, weights: Weights) -> None:
        from cwtrain.hotload.delta import write_delta

        self._delta = self.directory / f"delta{self._number}"
        version, base = f"{self._number:06d}", f"{self._number - 1:06d}"
        write_delta(
            str(self._base), str(self._new), str(self._delta), version=version, base_version=base
        )
        files = self._delta.glob("*.safetensors")
        self.payload_bytes = sum(path.stat().st_size for path in files)

    def receive(self) -> None:
        self._mirror.apply_delta(str(self._delta))
        shutil.rmtree(self._base)
        self._base = self._new

    def weights(self) -> Mapping[str, np.ndarray]:
        return _bits_of(self.directory / "mirror")


RIVALS: tuple[type[Rival], ...] = (
    Syncline,
    SynclineTight,
    SlimeXor,
    ModelExpress,
    CwTrain,
    TorchIndices,
    SafetensorsFull,
    ZipNN,
)


def _torch(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16))


def _bf16(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: _torch(bits).view(torch.bfloat16) for name, bits in weights.items()}


def _save_checkpoint(weights: Weights, directory: Path) -> Path:
    directory.mkdir(parents=True)
    save_torch_file(_bf16(weights), directory / "model.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text("{}")
    return directory


def _bits_of(path: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted(path.rglob("*.safetensors")):
        for meta, bits in syncline.CheckpointSource(file).tensors():
            found[meta.name] = bits
    return found


def _seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def read_roofs_bytes_per_s(weights: Weights, other: Weights) -> dict[str, float]:
    """Return how fast one thread, and two, read both copies and do nothing else."""

    def read(name: str) -> None:
        kernels.read_words(weights[name], other[name])

    total = 2 * sum(bits.nbytes for bits in weights.values())
    one_s = min(_seconds(lambda: [read(name) for name in weights]) for _ in range(5))
    with ThreadPoolExecutor(THREADS) as pool:
        two_s = min(_seconds(lambda: list(pool.map(read, weights))) for _ in range(5))
    return {"one_thread": total / one_s, "two_threads": total / two_s}


def main() -> None:
    """Run all rivals and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--only", help="names of classes, with commas")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    wanted = [
        rival for rival in RIVALS if arguments.only is None or rival.__name__ in arguments.only
    ]
    with tempfile.TemporaryDirectory(prefix="syncline-rivals-") as directory:
        result = run(Path(directory), wanted, arguments.runs, arguments.density)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    roofs = result["read_bytes_per_s"]
    print("both copies read:", {name: f"{speed / 1e9:.1f} GB/s" for name, speed in roofs.items()})
    print(f"{'':46} publish s (least)  receive s (least)   payload   smaller")
    for row in result["rivals"]:
        print(
            f"{row['name']:46} {row['publish_s']:.3f} ({row['publish_least_s']:.3f})     "
            f"{row['receive_s']:.3f} ({row['receive_least_s']:.3f})     "
            f"{row['payload_bytes'] / 1e6:7.2f} MB {row['times_smaller']:6.1f}x"
        )


def run(directory: Path, wanted: list[type[Rival]], runs: int, density: float) -> dict[str, Any]:
    """Return medians of all rivals over the same steps; ends the process if a result is not exact."""
    source = CaseSource()
    current = {name: bits for name, (_, bits) in source.weights.items()}
    full_bytes = sum(bits.nbytes for bits in current.values())
    rivals = []
    for rival in wanted:
        place = directory / rival.__name__
        place.mkdir()
        rivals.append(rival(current, place))
    times: dict[str, list[tuple[float, float]]] = {rival.name: [] for rival in rivals}
    before = {name: bits.copy() for name, bits in current.items()}
    for _ in range(runs):
        source.step(density)
        for rival in rivals:
            if isinstance(rival, CwTrain):
                rival.prepare(current)
            sent_s = _seconds(lambda rival=rival: rival.publish(current))
            times[rival.name].append((sent_s, _seconds(rival.receive)))
    for rival in rivals:
        held = rival.weights()
        for name, bits in current.items():
            if not np.array_equal(held[name].view(np.uint16), bits):
                raise SystemExit(f"{rival.name}: {name} differs")
    rows = []
    for rival in rivals:
        sent, taken = zip(*times[rival.name], strict=True)
        rows.append(
            {
                "name": rival.name,
                "publish_s": statistics.median(sent),
                "publish_least_s": min(sent),
                "receive_s": statistics.median(taken),
                "receive_least_s": min(taken),
                "payload_bytes": rival.payload_bytes,
                "times_smaller": full_bytes / rival.payload_bytes,
            }
        )
    return {
        **machine("modelexpress", "cwtrain", "zipnn", "safetensors"),
        "threads": THREADS,
        "runs": runs,
        "density": density,
        "full_bytes": full_bytes,
        "read_bytes_per_s": read_roofs_bytes_per_s(current, before),
        "rivals": rows,
    }


if __name__ == "__main__":
    main()
