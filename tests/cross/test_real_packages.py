"""The slime layout against the real thing: modelexpress and cwtrain decode ours, and we theirs, bit for bit.

They run in an environment of their own (`make cross-env`; part of `make test`) as a subprocess.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from syncline import CheckpointDir, MemoryEngine, Publisher, Receiver
from syncline.format import part
from syncline.stores import open_store
from syncline.types import TensorMeta

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("SYNCLINE_CROSS_ENV", ROOT / ".venvs" / "cross"))
MADE_FROM = "".join(
    Path(__file__).with_name(name).read_text() for name in ("imports.txt", "packages.txt")
)

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / ".made-from").exists(),
    reason="modelexpress and cwtrain are not installed; run make cross-env",
)

Weights = dict[str, np.ndarray]


def other_side(function: str, *arguments: object) -> dict:
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "python", Path(__file__).with_name("foreign_side.py"), function]
        + [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": "", "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def draw(rng: np.random.Generator) -> Weights:
    """Weights with every bit pattern, NaN payloads among them, and several dtypes."""

    def bits(shape, kind):
        return rng.integers(0, 256, (*shape, np.dtype(kind).itemsize), np.uint8).view(kind)[..., 0]

    return {
        "model.embed_tokens.weight": bits((300, 64), np.uint16).view(ml_dtypes.bfloat16),
        "model.layers.0.mlp.weight": bits((128, 65), np.uint16).view(ml_dtypes.bfloat16),
        "model.layers.0.scale": bits((9,), np.uint32).view(np.float32),
        "model.norm.weight": bits((64,), np.uint16).view(np.float16),
    }


def step(weights: Weights, rng: np.random.Generator) -> Weights:
    """Move some elements of all tensors but the last by an ulp, some to anywhere."""
    out = {}
    for number, (name, array) in enumerate(weights.items()):
        new = array.copy()
        flat = new.reshape(-1).view(f"u{new.itemsize}")
        if number < len(weights) - 1:
            flat[rng.random(flat.size) < 0.02] += flat.dtype.type(1)
            flat[-1] ^= flat.dtype.type(0x7F)
        out[name] = new
    return out


def save(weights: Weights, directory: Path) -> Path:
    directory.mkdir(parents=True)
    names = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
    metas = [TensorMeta(n, names[a.dtype.name], a.shape) for n, a in weights.items()]
    chunks = part.encode(metas, lambda name: [weights[name].tobytes()], {"format": "pt"})
    (directory / "model.safetensors").write_bytes(b"".join(bytes(chunk) for chunk in chunks))
    (directory / "config.json").write_text('{"model_type": "cross"}')
    return directory


def assert_checkpoint(directory: Path, weights: Weights) -> None:
    found = {
        name: array
        for path in sorted(directory.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        assert found[name].tobytes() == array.tobytes(), name


def assert_engine(engine: MemoryEngine, weights: Weights) -> None:
    assert set(engine.tensors()) == set(weights)
    for name, array in weights.items():
        assert engine.view(name).tobytes() == array.tobytes(), name


@pytest.fixture
def states(rng) -> list[Weights]:
    states = [draw(rng)]
    for _ in range(3):
        states.append(step(states[-1], rng))
    return states


@pytest.fixture
def ours(tmp_path, states) -> Path:
    """A run that we publish for readers that know XOR and Adler-32 alone."""
    base = save(states[0], tmp_path / "base")
    publisher = Publisher(
        open_store(tmp_path / "ours"), base=base, layout="slime", encoding="xor", checksum="adler32"
    )
    for weights in states[1:]:
        publisher.publish(weights)
    return tmp_path / "ours"


def test_the_environment_is_the_one_that_is_asked_for():
    assert (ENVIRONMENT / ".made-from").read_text().startswith(MADE_FROM), "run make cross-env"


def test_cwtrain_takes_what_we_publish(tmp_path, ours, states):
    deltas = [ours / f"weight_v{number:06d}" for number in (2, 3, 4)]
    answer = other_side(
        "cwtrain_apply", ours / "weight_v000001", tmp_path / "mirror", "000001", *deltas
    )
    assert answer == {"version": "000004", "kinds": ["INCREMENTAL"] * 3}
    assert_checkpoint(tmp_path / "mirror", states[3])


def test_modelexpress_takes_what_we_publish(tmp_path, ours, states):
    answer = other_side(
        "modelexpress_apply",
        ours,
        tmp_path / "cache",
        ours / "weight_v000001",
        "000001",
        "000002",
        "000003",
        "000004",
    )
    assert_checkpoint(Path(answer["path"]), states[3])


def test_we_take_what_cwtrain_writes(tmp_path, states):
    run = tmp_path / "theirs"
    run.mkdir()
    saved = [save(weights, tmp_path / f"state{i}") for i, weights in enumerate(states)]
    other_side("cwtrain_full", saved[0], run / "weight_v000000")
    for number in (1, 2, 3):
        answer = other_side(
            "cwtrain_delta",
            saved[number - 1],
            saved[number],
            run / f"weight_v{number:06d}",
            f"{number:06d}",
            f"{number - 1:06d}",
        )
        assert answer == {"changed": 3}
    engine = MemoryEngine()
    report = Receiver(open_store(run), engine, verify="full").sync()
    assert (report.layout, report.identity, len(report.applied)) == ("slime", "000003", 4)
    assert_engine(engine, states[3])
    Receiver(open_store(run), CheckpointDir(saved[0], adopt=True)).sync()
    assert_checkpoint(saved[0], states[3])


def test_we_take_what_modelexpress_writes(tmp_path, states):
    run = tmp_path / "theirs"
    run.mkdir()
    saved = [save(weights, tmp_path / f"state{i}") for i, weights in enumerate(states)]
    answer = other_side("modelexpress_publish", run, tmp_path / "group", saved[0], *saved)
    assert answer["versions"] == ["first", "uid-1", "uid-2", "uid-3"]
    engine = MemoryEngine()
    report = Receiver(open_store(run), engine, verify="full").sync()
    assert (report.layout, report.identity, len(report.applied)) == ("slime", "uid-3", 4)
    assert_engine(engine, states[3])


def test_cwtrain_takes_what_convert_would_write(tmp_path, states):
    """`Interchange.write` without a manifest beside it: plain directories in the layout."""
    from syncline import interchange, kernels
    from syncline.types import Window, unsigned
    from syncline.version import ForeignVersion

    run = open_store(tmp_path / "plain")
    layout = interchange.get("slime")
    names = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}

    def tensors(old: Weights | None, new: Weights):
        for name, array in new.items():
            meta = TensorMeta(name, names[array.dtype.name], array.shape)
            dtype = unsigned(meta.unit_bytes)
            after = array.reshape(-1).view(dtype)
            before = after if old is None else old[name].reshape(-1).view(dtype)
            yield meta, [Window(0, after, *kernels.diff(before, after))]

    full = ForeignVersion("slime", "1", None, "full", "raw", "adler32")
    layout.write(run, full, tensors(None, states[0]), {"config.json": b"{}"})
    delta = ForeignVersion("slime", "2", "1", "delta", "xor", "adler32")
    layout.write(run, delta, tensors(states[0], states[1]))
    base, second = tmp_path / "plain" / "weight_v000001", tmp_path / "plain" / "weight_v000002"
    answer = other_side("cwtrain_apply", base, tmp_path / "mirror", "1", second)
    assert answer["version"] == "2"
    assert_checkpoint(tmp_path / "mirror", states[1])
