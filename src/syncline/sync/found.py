"""What a foreign version does to one tensor: its pieces as records, or as spans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from syncline import kernels
from syncline.errors import FormatError
from syncline.sync.decode import changed_units, record_fingerprint, to_record
from syncline.types import ZERO, Bits, Changes, Record, Span, TensorMeta


class Found:
    """What one tensor's payload changes: records, and once they have been used what they amount to.

    Attributes:
        difference: what the records add to the tensor's fingerprint; `changed`: units that change.
    """

    def __init__(self, meta: TensorMeta, pieces: Iterator[Changes | Span], bits: Bits) -> None:
        self.meta = meta
        self.difference = ZERO
        self.changed = 0
        self._pieces = pieces
        self._bits = bits
        self._taken: list[Record] | None = None

    def take_all(self) -> None:
        """Decode the payload to its end, which proves it; the records stay in memory."""
        self._taken = list(self._decode())

    def records(self) -> Iterable[Record]:
        """Return the records; can be used once."""
        return self._decode() if self._taken is None else self._taken

    def _decode(self) -> Iterator[Record]:
        seeds = kernels.seeds(self.meta.name)
        for piece in self._pieces:
            record = to_record(self.meta, piece, self._bits)
            if record.new_bits.size:
                self.difference += record_fingerprint(record, seeds)
                self.changed += changed_units(record)
                yield record


def only_spans(meta: TensorMeta, pieces: Iterator[Changes | Span]) -> Iterator[Span]:
    """Pass the pieces of a full version on.

    Raises:
        FormatError: one of them does not carry every unit.
    """
    for piece in pieces:
        if not isinstance(piece, Span):
            raise FormatError(
                f"tensor {meta.name!r}: a full version brings every unit, found changes",
                tensor=meta.name,
            )
        yield piece
