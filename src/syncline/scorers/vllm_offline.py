"""A `vllm.LLM` in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncline.abc import Scorer
from syncline.errors import ConfigError, TransportUnavailableError
from syncline.scorers.answers import as_scores, check_top, refuse, resumed_logprob
from syncline.types import Probe, Scores


class VllmOfflineScorer(Scorer):
    """Scores what a `vllm.LLM` computes; see `VllmScorer` for how.

    Args:
        llm: between two calls of its own.
    """

    name = "vLLM offline"

    def __init__(self, llm: Any) -> None:
        try:
            from vllm import SamplingParams  # noqa: PLC0415 - an optional package, a slow import
        except ImportError as error:
            raise TransportUnavailableError(f"vLLM cannot be imported ({error})") from error
        self._parameters = SamplingParams
        self._llm = llm

    def score(self, probes: Sequence[Probe], top: int) -> list[Scores]:
        """Return the scores of every probe; see `Scorer.score`."""
        check_top(top)
        if not probes:
            return []
        anew = [self._parameters(max_tokens=1, temperature=0.0, prompt_logprobs=top)] * len(probes)
        resumed = [
            self._parameters(
                max_tokens=1, temperature=0.0, logprobs=0, allowed_token_ids=[probe.tokens[-1]]
            )
            for probe in probes
        ]
        whole = self._generate([probe.tokens for probe in probes], anew)
        last = self._generate([probe.tokens[:-1] for probe in probes], resumed)
        return [
            self._scores(probe, top, one, other)
            for probe, one, other in zip(probes, whole, last, strict=True)
        ]

    def _generate(self, prompts: list[tuple[int, ...]], parameters: list[Any]) -> list[Any]:
        try:
            answers: list[Any] = self._llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                parameters,
                use_tqdm=False,
            )
        except ValueError as error:
            raise ConfigError(f"{self.name}: the probes were refused: {error}") from error
        return answers

    def _scores(self, probe: Probe, top: int, answer: Any, resumed: Any) -> Scores:
        places = answer.prompt_logprobs[len(probe.prompt) :]
        rows = [{token: one.logprob for token, one in place.items()} for place in places]
        for token, row in zip(probe.continuation, rows, strict=True):
            if token not in row:
                refuse(self.name, f"token {token}", f"{sorted(row)}")
        taken = [row[token] for token, row in zip(probe.continuation, rows, strict=True)]
        [place] = resumed.outputs[0].logprobs
        again = resumed_logprob(
            probe.tokens[-1], {token: one.logprob for token, one in place.items()}, self.name
        )
        ranked = [list(row.items()) for row in rows]
        return as_scores(probe, taken, ranked, top, self.name, again)
