"""What says how probable a model finds fixed texts: the trainer's module, or an engine that serves.

Scores are of token ids, so no tokenizer has a part in them. Importing this loads none of torch,
transformers and vLLM.
"""

from syncline.scorers.memory import MemoryScorer
from syncline.scorers.sglang_http import SglangScorer
from syncline.scorers.torch_scorer import TorchScorer
from syncline.scorers.vllm_http import VllmScorer
from syncline.scorers.vllm_offline import VllmOfflineScorer

__all__ = ["MemoryScorer", "SglangScorer", "TorchScorer", "VllmOfflineScorer", "VllmScorer"]
