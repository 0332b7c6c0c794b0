"""Tied tensors: several canonical names of one memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from syncline import kernels
from syncline.errors import LayoutError
from syncline.types import ZERO, Fingerprint, Record, TensorMeta
from syncline.version import HeldVersion


class Tied(Mapping[str, TensorMeta]):
    """Tensors by name, where tied ones share memory: each memory is listed once, every name is found.

    `model.embed_tokens.weight` and `lm_head.weight` of a tied model are one tensor: iteration and length
    know the first name alone, `[]`, `in` and `get` both. So a version may list either or both.
    """

    def __init__(self, metas: Mapping[str, TensorMeta], aliases: Mapping[str, str]) -> None:
        self._metas = metas
        self.aliases = aliases

    def __getitem__(self, name: str) -> TensorMeta:
        return self._metas[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._metas if name not in self.aliases)

    def __len__(self) -> int:
        return len(self._metas) - len(self.aliases)


def agreeing(
    records: Iterable[Record], aliases: Mapping[str, str], held: HeldVersion
) -> Iterator[Record]:
    """Pass the records on; refuse at their end if tied tensors, which are one, would get other bits.

    All of them start from the same bits, so they agree if their changes have the same fingerprint.

    Args:
        aliases: the later names of tied tensors with the first name of each.

    Raises:
        LayoutError: they do not agree.
    """
    tied = {*aliases, *aliases.values()}
    totals: defaultdict[str, Fingerprint] = defaultdict(lambda: ZERO)
    for record in records:
        if record.name in tied:
            totals[record.name] += _change(record)
        yield record
    listed = held.manifest.by_name
    for alias, first in aliases.items():
        if alias in listed and first in listed and totals[alias] != totals[first]:
            raise LayoutError(
                f"tensors {first!r} and {alias!r} are tied in the module, but version {held.version} has "
                "different bits for them; nothing was written; build the module without tying them",
                tensor=alias,
                version=held.version,
            )


def _change(record: Record) -> Fingerprint:
    """Return what a record adds to a fingerprint that is blind to the tensor's name."""
    seeds = kernels.seeds("tied")
    offsets = record.offsets
    if offsets is None:
        before = kernels.fingerprint(record.old_bits, record.start, seeds)
        return kernels.fingerprint(record.new_bits, record.start, seeds) - before
    return kernels.fingerprint_change(
        record.start, offsets, record.old_bits, record.new_bits, seeds
    )
