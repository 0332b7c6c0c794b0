"""Make the raw shards that layouts are tested with: `make_shards.py FOLDER [CASE...]`

Every case is a tiny checkpoint, and what the ranks of one mesh hold after a bridge has loaded it into
megatron-core: real processes over Gloo on a CPU, in the environments that `make oracles` makes. In FOLDER
come to lie `FAMILY/huggingface/` and `FAMILY/tpA_ppB_epC_etpD_vppE/rankN.safetensors`, some fifteen seconds a case.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / ".venvs"
WAIT_S = 1000


@dataclass(frozen=True, slots=True)
class Case:
    """One family in one mesh.

    Attributes:
        family: a name in `tiny_checkpoints.FAMILIES`.
        bridge: `mbridge`, with megatron-core 0.16.1; or `megatron-bridge`, with 0.19.2.
        world: number of ranks.
        tp, pp, ep, etp, vpp: sizes of the mesh.
        vocab_multiple: what the vocabulary is padded to a multiple of; 0: not padded.
        is_recorded: whether the shared fixtures hold these shards.
    """

    family: str
    bridge: str
    world: int
    tp: int
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    vocab_multiple: int = 0
    is_recorded: bool = False

    @property
    def name(self) -> str:
        """The folder of the shards, under that of everything."""
        return f"{self.family}/tp{self.tp}_pp{self.pp}_ep{self.ep}_etp{self.etp}_vpp{self.vpp}"

    @property
    def python(self) -> Path:
        """The interpreter of the environment that has this bridge."""
        folder = "oracles" if self.bridge == "mbridge" else "bridge"
        return ENVIRONMENTS / folder / "bin" / "python"


RECORDED = (
    Case("llama", "mbridge", 4, tp=2, pp=2, vpp=2, is_recorded=True),
    Case("qwen2_tied", "mbridge", 4, tp=2, pp=2, is_recorded=True),
    Case("qwen3", "mbridge", 4, tp=4, is_recorded=True),
    Case("qwen3v", "mbridge", 2, tp=2, vocab_multiple=256, is_recorded=True),
    Case("qwen3_moe", "mbridge", 4, tp=2, ep=2, etp=2, is_recorded=True),
    Case("qwen3_moe", "mbridge", 4, tp=4, ep=2, is_recorded=True),
    Case("deepseek_v3", "mbridge", 4, tp=2, pp=2, etp=2, vpp=2, is_recorded=True),
    Case("deepseek_v3_mtp", "megatron-bridge", 4, tp=2, pp=2, ep=2, is_recorded=True),
    Case("glm4_moe", "megatron-bridge", 2, tp=2, ep=2, is_recorded=True),
    Case("gpt_oss", "megatron-bridge", 2, tp=2, ep=2, is_recorded=True),
    Case("gemma3", "megatron-bridge", 2, tp=2, is_recorded=True),
    Case("qwen3_next", "megatron-bridge", 2, tp=2, is_recorded=True),
)
# Families that no recorded shard speaks for.
MORE = (
    Case("mixtral", "mbridge", 4, tp=2, pp=2, ep=2),
    Case("mixtral", "mbridge", 4, tp=2, ep=2, etp=2),
    Case("kimi_k2", "megatron-bridge", 4, tp=2, pp=2, ep=2),
    Case("minimax_m2", "megatron-bridge", 4, tp=2, pp=2, ep=2),
    Case("minimax_m2", "megatron-bridge", 4, tp=4, ep=4),
    Case("qwen3_5", "megatron-bridge", 4, tp=2, pp=2),
    Case("qwen3_5_moe", "megatron-bridge", 2, tp=2, ep=2),
    Case("qwen3_vl", "megatron-bridge", 2, tp=2),
    Case("qwen3_vl_moe", "megatron-bridge", 2, tp=2, ep=2),
)
CASES = (*RECORDED, *MORE)


def make(case: Case, folder: Path) -> Path:
    """Make checkpoint and shards of a case; return the folder of the shards.

    Raises:
        RuntimeError: a process failed; with the end of what it said.
    """
    out = folder / case.name
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / case.family / "huggingface"
    if not checkpoint.exists():
        _run([case.python, HERE / "tiny_checkpoints.py", folder, case.family])
    sizes = (case.tp, case.pp, case.ep, case.etp, case.vpp, case.vocab_multiple)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _run(
        [
            *(case.python, "-m", "torch.distributed.run", f"--nproc_per_node={case.world}"),
            *(f"--master_port={port}", HERE / "bridge_ranks.py", case.bridge, checkpoint, out),
            *sizes,
        ]
    )
    return out


def _run(command: list[object]) -> None:
    # torchrun leaves a folder wherever temporary files go.
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [str(word) for word in command],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout[-6000:]}")


def main() -> None:
    """Make the cases that are named, or all."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for case in CASES:
        if not names or case.name in names or case.family in names:
            sys.stdout.write(f"{make(case, folder)}\n")


if __name__ == "__main__":
    main()
