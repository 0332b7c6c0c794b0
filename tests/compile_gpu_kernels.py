"""Compile every GPU kernel for every width as its launcher asks for it; no GPU is needed, nothing is run.

Run as a script, without TRITON_INTERPRET: prints a JSON list of what came out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from syncline.kernels import gpu, gpu_programs

COMPILED: list[dict[str, object]] = []
WIDTHS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


class AbsentGpu:
    """What Triton asks a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def registers_and_stack(machine_code: bytes) -> dict[str, int]:
    """Return registers a thread, and bytes of stack a thread: where registers are spilled to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        out = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", out.stdout + out.stderr)
    return {"registers": int(found[1]), "stack_bytes": int(found[2])}


def compile_only(program, grid: int, *arguments, **constants) -> None:
    """Stand in for `gpu.run`."""
    kernel = program.warmup(*arguments, grid=(grid,), **constants, **gpu.OPTIONS)
    ptx = kernel.asm["ptx"]
    COMPILED.append(
        {
            "name": program.__name__,
            "unit_bytes": arguments[0].element_size(),
            "units": arguments[0].numel(),
            "machine_code_bytes": len(kernel.asm["cubin"]),
            "wide_loads": ptx.count("ld.global.v4.b32") + ptx.count("ld.global.v2.b64"),
            **registers_and_stack(kernel.asm["cubin"]),
        }
    )
    # Nothing ran, so the launcher is told that something was found, and that no offset is wrong.
    if program is gpu_programs.compare:
        arguments[4].fill_(1)
    if program is gpu_programs.first_fault:
        arguments[3].fill_(arguments[1])


def launch_all(bits: torch.Tensor, start: int, seeds: tuple[int, int]) -> None:
    offsets = torch.zeros(len(bits), dtype=torch.uint32)
    gpu.diff(bits, bits, refresh=True)
    gpu.scatter(bits, offsets, bits)
    gpu.gather(bits, offsets)
    gpu.fingerprint(bits, start, seeds)
    gpu.fingerprint_change(start, offsets, bits, bits, seeds)


def main(capability: int) -> None:
    driver.set_active(AbsentGpu(capability))
    gpu.run = compile_only
    gpu.is_interpreting = lambda: True
    # Triton compiles anew for numbers that are 1 or a multiple of 16, and for addresses that are not.
    for dtype in WIDTHS.values():
        launch_all(torch.zeros(4096, dtype=dtype), 0, (1 << 63, 5))
    launch_all(torch.zeros(1, dtype=torch.uint16), 1, (1, 1))
    launch_all(torch.zeros(1, dtype=torch.uint64), 1, (0, 16))
    launch_all(torch.zeros(78, dtype=torch.uint16)[1:], 2**40 + 7, (2**64 - 1, 2**31))
    sys.stdout.write(json.dumps(COMPILED))


if __name__ == "__main__":
    main(int(sys.argv[1]))
