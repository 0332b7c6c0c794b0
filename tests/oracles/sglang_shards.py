"""Run in SGLang's environment: `sglang_shards.py CHECKPOINT OUT TP EP`; every rank saves what it holds.

SGLang starts as it would to serve, on a CPU, and its own sharded-state saver writes the parameters.
Nothing of Syncline is imported: what this writes is the other opinion.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Start, save, stop."""
    checkpoint, out, tp, ep = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if tp > 1:
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tp))
    import sglang

    engine = sglang.Engine(
        model_path=checkpoint,
        device="cpu",
        dtype="float32",
        tp_size=tp,
        ep_size=ep,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        mem_fraction_static=0.5,
        max_total_tokens=512,
        max_running_requests=2,
        skip_server_warmup=True,
        skip_tokenizer_init=True,
        log_level="error",
    )
    out.mkdir(parents=True, exist_ok=True)
    engine.save_sharded_model(path=str(out), pattern=None, max_size=None)
    engine.shutdown()


if __name__ == "__main__":
    main()
