"""Which worker answers for which elements, and the fingerprint of those, kept in step in O(changes)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from syncline import kernels
from syncline.engines.learned.live import LiveWeights
from syncline.engines.learned.localised import within
from syncline.errors import VerifyError
from syncline.layouts.blocks import Block, Run, run_of
from syncline.sync.decode import record_fingerprint
from syncline.sync.fingerprints import fingerprints
from syncline.types import ZERO, Fingerprint
from syncline.vllm.copy import HostCopy
from syncline.vllm.forms import Forms
from syncline.vllm.ranks import Workers

_DIGITS = 8
_AT_A_TIME = 1600 // _DIGITS
_NOTHING = "0" * _DIGITS


class Shares:
    """One worker's share of the model's fingerprint: what several workers hold counts for the first of them.

    The others compare theirs with the host's copy.

    Tensors that no worker holds in a form that can be read or followed (tied names that the loader skips, those that are loaded whole)
    count for the first worker, by the host's copy.

    Args:
        workers: asked once who holds what. Collective.
    """

    def __init__(self, live: LiveWeights, forms: Forms, workers: Workers, timeout_s: float) -> None:
        self._live = live
        self._forms = forms
        learned = live.learned
        by_name: dict[str, list[Block]] = {}
        for block in learned.placement.blocks:
            by_name.setdefault(block.name, []).append(block)
        names = sorted([*learned.layout.catalog, *learned.unmapped])
        own = {name: _digest(by_name.get(name, [])) for name in names}
        everyone = _exchanged([own[name] for name in names], workers, timeout_s)
        self._blocks: list[Block] = []
        self._from_copy: set[str] = set()
        self._replicas: list[str] = []
        for place, name in enumerate(names):
            digests = [one[place] for one in everyone]
            if set(digests) == {_NOTHING}:
                if workers.rank == 0:
                    self._from_copy.add(name)
            elif own[name] != _NOTHING and digests.index(own[name]) == workers.rank:
                self._blocks += _distinct(by_name[name])
            elif own[name] != _NOTHING:
                self._replicas.append(name)
        self._runs: dict[str, list[Run]] = {}
        for block in self._blocks:
            run = run_of(block, learned.layout.catalog[block.name].grid)
            self._runs.setdefault(block.name, []).append(run)
        self._total: Fingerprint | None = None
        self._change = ZERO

    def total(self, copy: HostCopy) -> Fingerprint:
        """Return the share; the first time everything is read.

        Raises:
            VerifyError: what another worker answers for is not what the copy holds.
        """
        if self._total is None:
            self._check_replicas(copy)
            self._total = self.in_full(copy) - self._change
        return self._total + self._change

    def in_full(self, copy: HostCopy) -> Fingerprint:
        """Return the share, read from live memory; of what is kept packed, from what was packed."""
        total = sum(self._live.shares(self._blocks).values(), ZERO)
        total += self._forms.shares(self._blocks, copy.view)
        metas = [copy.tensors()[name] for name in sorted(self._from_copy)]
        return total + sum((value for _, value in fingerprints(metas, copy.view)), ZERO)

    def change(self, copy: HostCopy, *, everything: bool) -> None:
        """Note what was written; after `everything` all is read again."""
        if everything:
            self._total, self._change = None, ZERO
            return
        self._change = sum(self._changes(copy), ZERO)

    def forget(self) -> None:
        """Take back what was noted."""
        self._change = ZERO

    def settle(self) -> None:
        """Take what was noted for good."""
        if self._total is not None:
            self._total += self._change
        self._change = ZERO

    def _check_replicas(self, copy: HostCopy) -> None:
        for name in self._replicas:
            found = next(self._live.differences(name, copy.view(name)), None)
            if found is not None:
                raise VerifyError(
                    f"tensor {name!r}: this worker's own copy of it, in {found.name!r}, has other bits than the "
                    "version: something else changed the weights; stage the version as a repair",
                    tensor=name,
                )

    def _changes(self, copy: HostCopy) -> Iterator[Fingerprint]:
        for record in copy.pending:
            seeds = kernels.seeds(record.name)
            if record.name in self._from_copy:
                yield record_fingerprint(record, seeds)
            for run in self._runs.get(record.name, ()):
                for part in within(run, record):
                    yield record_fingerprint(part, seeds)


def _digest(blocks: list[Block]) -> str:
    """Return what is equal for workers that hold the same elements of a tensor."""
    if not blocks:
        return _NOTHING
    text = repr(sorted({block.box for block in blocks})).encode()
    return hashlib.sha256(text).hexdigest()[:_DIGITS]


def _distinct(blocks: list[Block]) -> list[Block]:
    """Return the blocks without those that hold elements which one before them holds."""
    return list({block.box: block for block in reversed(blocks)}.values())


def _exchanged(own: list[str], workers: Workers, timeout_s: float) -> list[list[str]]:
    """Return what every worker says of every tensor, by rank."""
    everyone: list[list[str]] = [[] for _ in range(workers.count)]
    for first in range(0, len(own), _AT_A_TIME):
        text = "".join(own[first : first + _AT_A_TIME])
        for rank, said in enumerate(workers.gather({"holds": text}, timeout_s)):
            theirs = said["holds"]
            everyone[rank] += [theirs[i : i + _DIGITS] for i in range(0, len(theirs), _DIGITS)]
    return everyone
