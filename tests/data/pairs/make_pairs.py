"""Make the checkpoints beside this file: a model trained here from scratch, before and after RL steps.

Two layers over single characters, taught sums from random weights, then 24 steps of the demo's RL loop at
1e-6 with masters anywhere in their rounding cell; `old`, and what it has become one and eight steps later.

python tests/data/pairs/make_pairs.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from safetensors.torch import save_file

from syncline.demo.config import DemoConfig
from syncline.demo.engine import TransformersEngine
from syncline.demo.identity import live_tensors
from syncline.demo.loop import Loop
from syncline.demo.tiny import write_tiny

SEED = 7
WARM_UP_STEPS = 24
SAVED = {0: "old", 1: "one_step_later", 8: "eight_steps_later"}


def main() -> None:
    """Train, and write what `SAVED` names."""
    with tempfile.TemporaryDirectory() as scratch:
        model, store = Path(scratch) / "model", str(Path(scratch) / "store")
        write_tiny(model, SEED, hidden_size=80, intermediate_size=208)  # 146,000 weights
        config = DemoConfig(model=model, learning_rate=1e-6, seed=SEED)
        engine = TransformersEngine(model, store)
        loop = Loop(config, model, store, engine)
        loop.trainer.spread_masters(SEED)
        for step in range(WARM_UP_STEPS + max(SAVED) + 1):
            if step:
                loop.step(step, lambda _: None)
            name = SAVED.get(step - WARM_UP_STEPS)
            if name is not None:
                save_file(
                    live_tensors(engine.model), Path(__file__).with_name(f"{name}.safetensors")
                )


if __name__ == "__main__":
    main()
