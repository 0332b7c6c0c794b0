"""What do the GPU kernels, publishing and applying cost on one CUDA machine, against what it can do at most?

Prints JSON: roofs (device copy and read, transfers each way from pinned and pageable memory), every kernel
with the share of its roof, and whole publishes and syncs of the case of bench_sync.py. Every result is
compared with numpy's or with the weights, bit for bit; a difference ends the run. Under ten minutes.

`--dry-run` runs all of it over host memory, small, with TRITON_INTERPRET=1: it tests this script, and its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import triton
from bench_sync import shapes
from gpu_machine import Machine, check, measure_roofs

import syncline
from syncline import arrays, kernels
from syncline.engines import TorchModule
from syncline.kernels import gpu, reference
from syncline.sync.detect import Difference
from syncline.sync.phases import Phases

UNITS = 1 << 28
DRY_UNITS = 1 << 13
DENSITIES = (0.001, 0.01, 0.1)
WIDTHS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
SEEDS = kernels.seeds("model.embed_tokens.weight")
SECTOR_BYTES = 32
"""What a GPU reads at least to read anything: a change that stands alone costs one."""


def changed(machine: Machine, old: Any, density: float) -> Any:
    """Return a copy of which about this share of the units differ by their lowest bit."""
    new = old.clone()
    count = max(1, int(len(old) * density))
    places = torch.randint(0, len(old), (count,), device=machine.device).unique()
    first = new.view(torch.uint8)
    first[places * old.element_size()] ^= 1
    return new


def measure_detect(machine: Machine) -> None:
    for width, dtype in WIDTHS.items():
        old = machine.random_bits(machine.units * 2 // width, dtype)
        for density in DENSITIES if width == 2 else (0.01,):
            measure_diff(machine, old, density)


def measure_diff(machine: Machine, old: Any, density: float) -> None:
    """Time both halves of a diff and all of it, with and without refreshing; and plain torch at it."""
    new, width = changed(machine, old, density), old.element_size()
    found = kernels.diff(old, new)
    wanted = reference.diff(host(old), host(new), refresh=False)
    for name, left, right in zip(("offsets", "old", "new"), found, wanted, strict=True):
        check(f"diff {name}", host(left), right)
    label = f"{8 * width} bits, {density:.1%}"
    both, lone = 2 * old.nbytes, min(SECTOR_BYTES, int(width / density))
    apart = len(found[0]) * (2 * lone + 4 + 2 * width)
    marks, work = gpu.compare(old, new), old.clone()

    def timed(name: str, nbytes: int, act: Any, **more: Any) -> None:
        machine.time(f"{name}, {label}", nbytes, act, roof="device read", **more)

    timed("compare", both, lambda: gpu.compare(old, new))
    timed("compact", apart, lambda: gpu.compact(old, new, *marks, refresh=False))
    timed("diff", both + apart, lambda: kernels.diff(old, new))
    timed(
        "diff and refresh",
        both + apart + len(found[0]) * lone,
        lambda: kernels.diff(work, new, refresh=True),
        before=lambda: work.copy_(old),
    )
    check("diff refresh", host(work), host(new))
    if width == 2:
        signed = old.view(torch.int16), new.view(torch.int16)
        timed("diff by torch", both + apart, lambda: by_torch(*signed))


def by_torch(old: Any, new: Any) -> tuple[Any, Any, Any]:
    places = (old != new).nonzero().squeeze(1)
    return places, old[places], new[places]


def measure_changes(machine: Machine, dtype: Any) -> None:
    """Time what costs O(changes), at 1 %, and whole fingerprints."""
    width = torch.empty(0, dtype=dtype).element_size()
    old = machine.random_bits(machine.units * 2 // width, dtype)
    new, work = changed(machine, old, 0.01), old.clone()
    offsets, old_bits, new_bits = kernels.diff(old, new)
    check("gather", host(kernels.gather(old, offsets)), host(old_bits))
    before, after = (kernels.fingerprint(bits, 0, SEEDS) for bits in (old, new))
    change = kernels.fingerprint_change(0, offsets, old_bits, new_bits, SEEDS)
    if not before + change == after == kernels.fingerprint(host(new), 0, SEEDS):
        raise SystemExit(f"fingerprints of {8 * width} bits: not those of the host")
    touched = len(offsets) * (4 + width + SECTOR_BYTES)

    def timed(name: str, nbytes: int, act: Any, roof: str = "device read") -> None:
        machine.time(f"{name}, {8 * width} bits", nbytes, act, roof=roof)

    timed("gather", touched, lambda: kernels.gather(old, offsets))
    timed(
        "scatter",
        touched + len(offsets) * SECTOR_BYTES,
        lambda: kernels.scatter(work, offsets, new_bits),
        "device copy",
    )
    check("scatter", host(work), host(new))
    timed("fingerprint", old.nbytes, lambda: kernels.fingerprint(old, 0, SEEDS))
    timed(
        "fingerprint_change",
        len(offsets) * (4 + 2 * width),
        lambda: kernels.fingerprint_change(0, offsets, old_bits, new_bits, SEEDS),
    )


class Trainer:
    """The case of bench_sync.py on the device; small tensors alone in a dry run."""

    def __init__(self, machine: Machine) -> None:
        self.weights = {
            name: (torch.randn(shape, device=machine.device) * 0.02).bfloat16()
            for name, shape in shapes()
            if machine.is_real or name.endswith("0.input_layernorm.weight")
        }

    def step(self) -> None:
        """Move 1 % of every tensor's elements by one ulp."""
        for tensor in self.weights.values():
            bits = tensor.view(torch.int16).view(-1)
            count = max(1, len(bits) // 100)
            places = torch.randint(0, len(bits), (count,), device=bits.device).unique()
            bits[places] += torch.randint(0, 2, (len(places),), device=bits.device).short() * 2 - 1


def measure_sync(machine: Machine, *, device_copy: bool) -> dict[str, object]:
    """Time publishes and syncs into a module on the device, and return where their seconds went."""
    trainer, store = Trainer(machine), syncline.MemoryStore()
    publisher = syncline.Publisher(store, device_copy=device_copy)
    publisher.publish(trainer.weights)
    module = torch.nn.Module()
    names = {}
    for number, (name, tensor) in enumerate(trainer.weights.items()):
        module.register_buffer(f"buffer{number}", torch.zeros_like(tensor))
        names[f"buffer{number}"] = name
    engine = TorchModule(module, names)
    receiver = syncline.Receiver(store, engine)
    receiver.sync()
    published, applied = [], []
    for _ in range(machine.runs):
        trainer.step()
        machine.finish()
        published.append(publisher.publish(trainer.weights))
        applied.append(receiver.sync())
    for entry, name in names.items():
        served = arrays.as_bits(name, module.get_buffer(entry))[1]
        check(name, served, arrays.as_bits(name, trainer.weights[name])[1])
    start_s = time.perf_counter()
    syncline.Receiver(store, engine, verify="full").sync()
    verified_s = time.perf_counter() - start_s
    last = published[-1]
    detected_s = detect_alone_s(machine, trainer, publisher)
    read_s = 2 * last.full_bytes / machine.roofs["device read"]
    crossing_s = last.full_bytes / machine.roofs["to host, pinned"]
    return {
        "device_copy": device_copy,
        "parameters": last.total,
        "changed": last.changed,
        "payload_bytes": last.payload_bytes,
        "publish_s": medians(published),
        "sync_s": medians(applied),
        "verify_full_s": verified_s,
        "detect_alone_s": detected_s,
        "reading_both_copies_of_detect_alone": read_s / detected_s,
        "reading_both_copies_of_publish": read_s / medians(published)["total"],
        "crossing_once_of_detect_alone": crossing_s / detected_s,
        "crossing_once_of_sync": crossing_s / medians(applied)["total"],
    }


def detect_alone_s(machine: Machine, trainer: Trainer, publisher: syncline.Publisher) -> float:
    """Return the fastest time of comparing all weights and bringing what changed, without encoding it."""
    snapshot, phases = publisher._snapshot, Phases()  # noqa: SLF001 - what is measured
    taken = []
    for _ in range(machine.runs):
        trainer.step()
        machine.finish()
        start_s = time.perf_counter()
        for name, tensor in trainer.weights.items():
            meta, bits = arrays.device_bits(name, tensor)
            for _ in Difference(meta, snapshot.bits(name), bits, phases, copies=snapshot.copies):
                pass
        taken.append(time.perf_counter() - start_s)
    return min(taken)


def medians(reports: list[Any]) -> dict[str, float]:
    names = sorted({name for report in reports for name in report.seconds})
    return {
        name: statistics.median(report.seconds.get(name, 0.0) for report in reports)
        for name in names
    }


def host(bits: Any) -> Any:
    return bits.cpu().numpy()


def about(machine: Machine) -> Iterator[tuple[str, object]]:
    """Yield what the figures depend on."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    yield "commit", subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    yield "date", time.strftime("%Y-%m-%d")
    yield "device", torch.cuda.get_device_name() if machine.is_real else "none: dry run"
    yield "host", f"{platform.machine()}, {os.cpu_count()} cores"
    yield "torch", torch.__version__
    yield "triton", triton.__version__
    yield "cuda", torch.version.cuda
    yield "is_dry_run", not machine.is_real


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--dry-run", action="store_true", help="test this script without a GPU")
    arguments = parser.parse_args()
    if arguments.dry_run:
        if not gpu.is_interpreting():
            raise SystemExit("gpu.py --dry-run: set TRITON_INTERPRET=1 (and SYNCLINE_THREADS=1)")
        arrays.is_on_gpu = arrays.is_torch_tensor
        machine = Machine("cpu", DRY_UNITS, 1)
    elif not torch.cuda.is_available():
        raise SystemExit(
            "gpu.py needs a CUDA device and a torch built for it; torch sees none here"
        )
    elif gpu.is_interpreting():
        raise SystemExit("gpu.py: unset TRITON_INTERPRET, which keeps the kernels off the GPU")
    else:
        machine = Machine("cuda", UNITS, arguments.runs)
    started_s = time.perf_counter()
    torch.manual_seed(0)
    measure_roofs(machine)
    measure_detect(machine)
    for dtype in WIDTHS.values():
        measure_changes(machine, dtype)
    syncs = [measure_sync(machine, device_copy=kept) for kept in (True, False)]
    result = {
        **dict(about(machine)),
        "roofs_bytes_per_s": machine.roofs,
        "figures": [asdict(figure) for figure in machine.figures],
        "syncs": syncs,
        "took_s": time.perf_counter() - started_s,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
