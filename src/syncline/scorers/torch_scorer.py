"""The trainer's own scores: a causal language model in this process, as transformers defines one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncline.abc import Scorer
from syncline.errors import ConfigError
from syncline.scorers.answers import as_scores, check_top
from syncline.types import Probe, Scores


class TorchScorer(Scorer):
    """Scores with a torch module that is called as transformers' causal language models are.

    Every probe is run alone and unpadded, in the module's own dtype, without gradients, in inference mode
    of the layers; the module is left in the mode it was in. Logits are taken to FP32 first, then the
    logarithm of the softmax is in FP64.

    Args:
        model: `model(input_ids=(1, length) int64).logits` is (1, length, vocabulary).
        name: for reports; default: its class and dtype.

    Cost: one forward pass for each probe. Collective: if the module's forward is, yes.
    """

    def __init__(self, model: Any, *, name: str | None = None) -> None:
        self._model = model
        self.name = f"{type(model).__name__} {_dtype(model)}" if name is None else name

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model has an embedding for."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    def score(self, probes: Sequence[Probe], top: int) -> list[Scores]:
        """Return the scores of every probe; see `Scorer.score`."""
        import torch  # noqa: PLC0415 - an extra

        check_top(top)
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.inference_mode():
                return [self._scores(probe, top) for probe in probes]
        finally:
            self._model.train(was_training)

    def _scores(self, probe: Probe, top: int) -> Scores:
        import torch  # noqa: PLC0415 - an extra

        device = next(self._model.parameters()).device
        vocabulary = self.vocabulary
        if max(probe.tokens) >= vocabulary or top > vocabulary:
            raise ConfigError(
                f"probe: expected token ids, and a top, within a vocabulary of {vocabulary}, found "
                f"{max(probe.tokens)}, and {top}"
            )
        ids = torch.tensor([probe.tokens], device=device)
        # The last token is scored by the place before it, and nothing by its own.
        logits = self._model(input_ids=ids).logits[0, len(probe.prompt) - 1 : -1]
        rows = logits.float().double().log_softmax(-1).cpu()
        values, tokens = rows.topk(top, dim=-1)
        taken = rows.gather(1, torch.tensor(probe.continuation)[:, None])[:, 0]
        ranked = [
            list(zip(ids_, values_, strict=True))
            for ids_, values_ in zip(tokens.tolist(), values.tolist(), strict=True)
        ]
        return as_scores(probe, taken.tolist(), ranked, top, self.name)


def _dtype(model: Any) -> str:
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        raise ConfigError("expected a module with parameters to score with, found one without")
    return str(parameter.dtype).removeprefix("torch.")
