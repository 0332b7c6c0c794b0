"""The main job on real input: a language model trained by RL, an engine kept bit-identical to it.

`run` trains a real pretrained model on a CPU by reinforcement learning in this process while a second
process generates; the weights travel only through a Syncline store. At the end every tensor of the
second process is compared with the trainer's. Importing this loads neither torch nor transformers.
"""

from syncline.demo.config import DemoConfig, DemoResult
from syncline.demo.session import run

__all__ = ["DemoConfig", "DemoResult", "run"]
