"""The main job on real input: RL on a real model, and an engine in another process kept bit-identical."""

from syncline.demo.config import DemoConfig, DemoResult
from syncline.demo.run import run

__all__ = ["DemoConfig", "DemoResult", "run"]
