"""A program: the demo's engine, but one bit of one weight flips before the digests are made."""

from __future__ import annotations

import sys

import torch

from syncline.demo import engine
from syncline.demo.identity import live_tensors

FLIPPED = "model.layers.1.mlp.down_proj.weight"


class FlippingEngine(engine.TransformersEngine):
    def digests(self) -> dict[str, str]:
        live_tensors(self.model)[FLIPPED].view(torch.int16)[3, 5] ^= 1
        return super().digests()


if __name__ == "__main__":
    engine.TransformersEngine = FlippingEngine
    engine.main(sys.argv[1:])
