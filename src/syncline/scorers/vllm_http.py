"""A running `vllm serve`, by its OpenAI-compatible completions route."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from syncline.abc import Scorer
from syncline.errors import EndpointError
from syncline.hotload import Token
from syncline.scorers.answers import as_scores, check_top, no_numbers, refuse, resumed_logprob
from syncline.scorers.http import TIMEOUT_S, JsonDoor, logprob, token_id
from syncline.types import Probe, Scores

ROUTE = "/v1/completions"
_TOKEN = "token_id:"  # noqa: S105 - a prefix that vLLM writes
_REFUSED, _NO_NUMBER = 400, "Out of range float values"
_NAMED = re.compile(_TOKEN + "[0-9]{1,10}")


class VllmScorer(Scorer):
    """Scores what a vLLM server computes: raw log-probabilities, before any sampling setting.

    A probe is two requests. The first asks for `prompt_logprobs` of the whole probe, for which vLLM computes
    every token anew, without its prefix cache. The second, for `Scores.resumed`, lets it continue all but
    the last token, and there the cache is read; it is filled for whoever comes next, so
    a cache that outlives its weights is seen after the next change of weights.

    Args:
        url: of the server, such as `http://127.0.0.1:8000`.
        timeout_s: longest that one request may take.
        token: the server's API key; None: it has none.

    The server must allow as many log-probabilities as are asked for (`--max-logprobs`, 20 by default) and a
    length of each probe and one (`--max-model-len`), and must not be paused.

    A vLLM that computes NaN refuses to tell it, since JSON has none: the scores of that probe are NaN then.
    """

    def __init__(
        self, url: str, *, timeout_s: float = TIMEOUT_S, token: Token | None = None
    ) -> None:
        self._door = JsonDoor(url.rstrip("/") + ROUTE, timeout_s=timeout_s, token=token)
        self.name = f"vLLM at {url}"

    def score(self, probes: Sequence[Probe], top: int) -> list[Scores]:
        """Return the scores of every probe; see `Scorer.score`."""
        check_top(top)
        return [self._told(probe, top) for probe in probes]

    def _told(self, probe: Probe, top: int) -> Scores:
        try:
            return self._scores(probe, top)
        except EndpointError as error:
            if error.status != _REFUSED or _NO_NUMBER not in str(error):
                raise
            return no_numbers(probe, top)

    def _scores(self, probe: Probe, top: int) -> Scores:
        answer = self._ask(probe.tokens, prompt_logprobs=top)
        places = self._door.items(answer, "choices", 0, "prompt_logprobs")
        if len(places) != len(probe.tokens):
            refuse(self._door.url, f"{len(probe.tokens)} places", f"{len(places)}")
        rows = [self._row(place) for place in places[len(probe.prompt) :]]
        taken = []
        for place, (token, row) in enumerate(zip(probe.continuation, rows, strict=True)):
            if token not in row:
                refuse(self._door.url, f"token {token} at place {place}", f"{sorted(row)}")
            taken.append(row[token])
        ranked = [list(row.items()) for row in rows]
        return as_scores(probe, taken, ranked, top, self._door.url, self._resumed(probe))

    def _resumed(self, probe: Probe) -> float:
        # The only token that is allowed is the one that is sampled; its raw log-probability is told.
        last = probe.tokens[-1]
        answer = self._ask(
            probe.tokens[:-1],
            logprobs=0,
            allowed_token_ids=[last],
            return_tokens_as_token_ids=True,
        )
        at = ("choices", 0, "logprobs")
        tokens = self._door.items(answer, *at, "tokens")
        values = self._door.items(answer, *at, "token_logprobs")
        url = self._door.url
        if len(tokens) != 1 or len(values) != 1 or _NAMED.fullmatch(str(tokens[0])) is None:
            refuse(url, f"token {last}, once", f"{tokens!r:.120}, {values!r:.120}")
        sampled = token_id(int(tokens[0].removeprefix(_TOKEN)), url)
        return resumed_logprob(last, {sampled: logprob(values[0], url)}, url)

    def _ask(self, tokens: Sequence[int], **options: Any) -> Any:
        question = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, **options}
        return self._door.ask(question)

    def _row(self, place: Any) -> dict[int, float]:
        """Return token ids and log-probabilities of one place."""
        url = self._door.url
        if not isinstance(place, dict):
            refuse(url, "an object of tokens at each place", f"{place!r:.120}")
        row = {}
        for key, entry in place.items():
            token = token_id(int(key) if key.isascii() and key.isdigit() else key, url)
            row[token] = logprob(self._door.member(entry, "logprob"), url)
        if len(row) < len(place):
            refuse(url, "every token once", f"{sorted(place)}")
        return row
