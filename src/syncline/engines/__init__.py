"""What serves the weights: memory, a torch module, or a checkpoint directory.

An engine takes a version whole or not at all. It sees decoded changes only, never payloads or stores.
"""

from syncline.engines.checkpoint_dir import CheckpointDir
from syncline.engines.memory import MemoryEngine
from syncline.engines.torch_module import TorchModule

__all__ = ["CheckpointDir", "MemoryEngine", "TorchModule"]
