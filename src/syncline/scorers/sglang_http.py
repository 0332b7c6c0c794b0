"""A running SGLang server, by its native `/generate` route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncline.abc import Scorer
from syncline.hotload import Token
from syncline.scorers.answers import as_scores, check_top, refuse
from syncline.scorers.http import TIMEOUT_S, JsonDoor, logprob, token_id
from syncline.types import Probe, Scores

ROUTE = "/generate"


class SglangScorer(Scorer):
    """Scores what an SGLang server computes, at temperature 1.

    A probe is two requests. The first asks for the log-probabilities of the input from its first token on,
    for which SGLang reads nothing from its radix cache. The second, for `Scores.resumed`, lets it continue
    all but the last token; there the cache is read, and filled for whoever comes next.

    Args:
        url: of the server, such as `http://127.0.0.1:30000`.
        timeout_s: longest that one request may take.
        token: the server's API key; None: it has none.

    The server must not be paused: a paused one holds requests until it is told to go on. SGLang does not
    check tokens: one that its model does not have may end the server, so draw probes from its vocabulary.
    """

    def __init__(
        self, url: str, *, timeout_s: float = TIMEOUT_S, token: Token | None = None
    ) -> None:
        self._door = JsonDoor(url.rstrip("/") + ROUTE, timeout_s=timeout_s, token=token)
        self.name = f"SGLang at {url}"

    def score(self, probes: Sequence[Probe], top: int) -> list[Scores]:
        """Return the scores of every probe; see `Scorer.score`."""
        check_top(top)
        return [self._scores(probe, top) for probe in probes]

    def _scores(self, probe: Probe, top: int) -> Scores:
        answer = self._ask(probe.tokens, logprob_start_len=0, top_logprobs_num=top)
        count = len(probe.continuation)
        entries = self._door.items(answer, "meta_info", "input_token_logprobs")
        if len(entries) != len(probe.tokens):
            refuse(self._door.url, f"{len(probe.tokens)} places", f"{len(entries)}")
        found = [self._entry(entry) for entry in entries[-count:]]
        if [token for token, _ in found] != list(probe.continuation):
            refuse(self._door.url, f"the tokens {probe.continuation}", f"{found!r:.200}")
        ranked: list[list[tuple[int, float]]] = [[] for _ in found]
        if top:
            rows = self._door.items(answer, "meta_info", "input_top_logprobs")
            if len(rows) != len(probe.tokens) or not all(isinstance(row, list) for row in rows[1:]):
                refuse(self._door.url, f"{len(probe.tokens)} rankings", f"{rows!r:.120}")
            ranked = [[self._entry(entry) for entry in row] for row in rows[-count:]]
        taken = [value for _, value in found]
        return as_scores(probe, taken, ranked, top, self._door.url, self._resumed(probe))

    def _resumed(self, probe: Probe) -> float:
        last = probe.tokens[-1]
        answer = self._ask(probe.tokens[:-1], logprob_start_len=-1, token_ids_logprob=[last])
        rows = self._door.items(answer, "meta_info", "output_token_ids_logprobs")
        found = [self._entry(entry) for row in rows for entry in (row or [])]
        if len(rows) != 1 or [token for token, _ in found] != [last]:
            refuse(self._door.url, f"token {last}, once", f"{rows!r:.200}")
        return found[0][1]

    def _ask(self, tokens: Sequence[int], **options: Any) -> Any:
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        question = {
            "input_ids": list(tokens),
            "sampling_params": sampling,
            "return_logprob": True,
            **options,
        }
        return self._door.ask(question)

    def _entry(self, entry: Any) -> tuple[int, float]:
        """Return token id and log-probability of `[log-probability, token id, text or null]`."""
        url = self._door.url
        if not isinstance(entry, list) or len(entry) != 3:
            refuse(url, "[log-probability, token id, text]", f"{entry!r:.120}")
        return token_id(entry[1], url), logprob(entry[0], url)
