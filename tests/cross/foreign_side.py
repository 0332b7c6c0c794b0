"""Run functions of modelexpress, cwtrain and fireworks_delta_compression as they are: `python foreign_side.py FUNCTION ARGUMENTS...`

Runs in the environment that scripts/cross_env.sh makes, never in Syncline's. What it finds is printed as
one line of JSON. Objects "in S3" are files below a directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

MODEL = "cross"
BUCKET = "s3://bucket/"


class DirectoryS3:
    """What modelexpress asks of its S3 client, on a directory."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def _path(self, uri: str) -> Path:
        return self._root / uri.removeprefix(BUCKET)

    def get(self, uri: str) -> bytes:
        return self._path(uri).read_bytes()

    def size(self, uri: str) -> int:
        return self._path(uri).stat().st_size

    def put(self, *, uri: str, data: bytes) -> None:
        path = self._path(uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def close(self) -> None:
        """Nothing is open."""


def index_uri(directory: str) -> str:
    return f"{BUCKET}{directory}/model.safetensors.index.json"


def cwtrain_delta(base: str, new: str, out: str, version: str, base_version: str) -> dict:
    from cwtrain.hotload.delta import write_delta

    stats = write_delta(base, new, out, version=version, base_version=base_version)
    return {"changed": stats.tensors_changed}


def cwtrain_full(source: str, out: str) -> dict:
    from cwtrain.hotload.delta import write_full_snapshot

    return {"path": str(write_full_snapshot(source, out))}


def cwtrain_apply(base: str, mirror: str, version: str, *deltas: str) -> dict:
    """Inspect and apply deltas to a copy of a checkpoint; the copy is then what cwtrain serves."""
    from cwtrain.hotload.mirror import WeightMirror
    from cwtrain.hotload.snapshot import inspect_snapshot

    applied = WeightMirror.create(base, mirror, version=version)
    kinds = []
    for delta in deltas:
        kinds.append(inspect_snapshot(delta).type.name)
        applied.apply_delta(delta)
    return {"version": applied.version, "kinds": kinds}


def modelexpress_apply(run: str, cache: str, seed: str, base: str, *versions: str) -> dict:
    """Rebuild the last of the versions (identities) from a seed checkpoint at version `base`."""
    from modelexpress_rl.inference.receiver import (
        ObjectStorageGeneratorConfig,
        _LocalCheckpoint,
        _S3Version,
    )
    from modelexpress_rl.object_storage import ObjectStorageType
    from modelexpress_rl.train import WeightPayloadFormat

    config = ObjectStorageGeneratorConfig(
        storage_type=ObjectStorageType.S3,
        initial_base_version_id=base,
        seed_checkpoint_path=seed,
        refit_checkpoint_dir=cache,
    )
    local = _LocalCheckpoint(model_name=MODEL, config=config, s3=DirectoryS3(run))
    local.initialize()
    chain = [
        _S3Version(
            version_id=version,
            base_version_id=before,
            payload_format=WeightPayloadFormat.XOR_DELTA,
            uri=index_uri(f"weight_v{version}"),
        )
        for before, version in zip((base, *versions), versions, strict=False)
    ]
    return {"path": str(local.prepare_chain(tuple(chain)).path)}


def modelexpress_publish(run: str, group: str, seed: str, *checkpoints: str) -> dict:
    """Publish a full version `first`, then every further checkpoint as a delta `uid-<number>`."""
    import torch.distributed as dist
    from modelexpress_rl import refit_pb2
    from modelexpress_rl.train.methods.canonical_delta import CanonicalDeltaPublicationMethod
    from modelexpress_rl.utils import make_tensor_reader
    from modelexpress_rl.version import WeightVersionRef
    from safetensors.torch import load_file

    dist.init_process_group("gloo", init_method=f"file://{group}", rank=0, world_size=1)
    target = refit_pb2.WeightVersion(model_name=MODEL)

    class Service:
        """The one call of the control plane that publishing makes."""

        def GetWeightVersion(self, request, timeout):  # noqa: N802 - the name of the protocol
            return refit_pb2.GetWeightVersionResponse(version=target)

    method = CanonicalDeltaPublicationMethod(
        config=SimpleNamespace(initial_base_version_id="seed", uri_prefix=BUCKET.rstrip("/")),
        model_name=MODEL,
        service=Service,
        rpc_timeout_seconds=5.0,
        process_group=dist.group.WORLD,
        read_seed_tensor=make_tensor_reader(seed)[0],
        s3=DirectoryS3(run),
    )
    names = ["first", *(f"uid-{number}" for number in range(1, len(checkpoints)))]
    for number, (name, path) in enumerate(zip(names, checkpoints, strict=True)):
        target.uid = name
        target.object_storage.storage_type = refit_pb2.OBJECT_STORAGE_TYPE_S3
        target.object_storage.uri = index_uri(name)
        target.payload_format = refit_pb2.WEIGHT_PAYLOAD_FORMAT_FULL_HF_CHECKPOINT
        if number:
            target.payload_format = refit_pb2.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA
            target.base_version_id = names[number - 1]
        tensors = list(load_file(Path(path) / "model.safetensors").items())
        version = WeightVersionRef(name)
        method.publish(
            version=version, staged=method.stage(version=version, hf_tensor_iter=[tensors])
        )
    method.close()
    dist.destroy_process_group()
    return {"versions": names}


def fireworks_compress(base: str, new: str, out: str, arc: str) -> dict:
    """Compress every safetensors file of a checkpoint against the file of the same name in its base."""
    from fireworks_delta_compression.compression import delta_compress_files_to_file

    Path(out).mkdir(parents=True)
    for path in sorted(Path(base).glob("*.safetensors")):
        delta_compress_files_to_file(
            src=str(path),
            dst=str(Path(new) / path.name),
            diff_file=str(Path(out) / path.name),
            compression_format=arc,
        )
    return {}


def fireworks_apply(base: str, delta: str, arc: str, how: str) -> dict:
    """Apply a snapshot to a checkpoint's files, one by one, by either of the package's functions."""
    from fireworks_delta_compression.compression import (
        decompress_delta_into_source,
        delta_decompress_inplace,
    )

    for path in sorted(Path(base).glob("*.safetensors")):
        diff = str(Path(delta) / path.name)
        if how == "inplace":
            delta_decompress_inplace(base_path=str(path), diff_path=diff, compression_format=arc)
        else:
            decompress_delta_into_source(diff, str(path), arc)
    return {}


FUNCTIONS = {
    function.__name__: function
    for function in (
        cwtrain_delta,
        cwtrain_full,
        cwtrain_apply,
        modelexpress_apply,
        modelexpress_publish,
        fireworks_compress,
        fireworks_apply,
    )
}


if __name__ == "__main__":
    print(json.dumps(FUNCTIONS[sys.argv[1]](*sys.argv[2:])))  # noqa: T201 - the answer
