"""What a foreign version does to one tensor: its pieces as records, or as spans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from syncline import kernels
from syncline.commit.journal import JournalWriter
from syncline.errors import FormatError, LayoutError
from syncline.sync.decode import changed_units, record_fingerprint, to_record
from syncline.types import ZERO, Bits, Changes, Record, Span, TensorMeta


class Found:
    """What one tensor's payload changes: records, and once they have been used what they amount to.

    Args:
        carried: the name under which the version carries the tensor.
        meta: the tensor as the engine lists it; tied tensors have one name there.
        pieces: what to overwrite; proved at their end.
        bits: what stands there.

    Attributes:
        difference: what the records add to the tensor's fingerprint; `changed`: units that change.
    """

    def __init__(
        self, carried: str, meta: TensorMeta, pieces: Iterator[Changes | Span], bits: Bits
    ) -> None:
        self.carried = carried
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


def stage_tensor(found: Found, done: dict[str, Found], stage: JournalWriter) -> None:
    """Write a tensor's records to a stage, and note it under the name that the engine lists.

    Raises:
        FormatError: the version carries the tensor twice.
        LayoutError: it carries tied tensors, which are one in the engine, with different bits.
    """
    other = done.setdefault(found.meta.name, found)
    for record in found.records():
        if other is found:
            stage.add(record)
    if other is found:
        return
    if other.carried == found.carried:
        raise FormatError(
            f"tensor {found.carried!r} came twice in one version", tensor=found.carried
        )
    # Both started from the same bits, so they agree if their changes have the same fingerprint.
    if other.difference != found.difference:
        raise LayoutError(
            f"tensors {other.carried!r} and {found.carried!r} are tied in the engine, but the version has "
            "different bits for them; nothing was written; build the engine without tying them",
            tensor=found.carried,
        )


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
