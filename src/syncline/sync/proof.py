"""What was decoded, passed on tensor by tensor and proved against the manifest before the last of it is used."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator

from syncline.errors import FormatError, VerifyError
from syncline.sync.decode import Decoded, DecodedSpan
from syncline.sync.slices import by_tensor
from syncline.types import ZERO, Fingerprint, Record, Span, TensorMeta
from syncline.version import Manifest, TensorEntry

OnChanged = Callable[[int], None]


def proved(
    decoded: Iterable[Decoded], manifest: Manifest, base: Manifest | None, on_changed: OnChanged
) -> Generator[Record, None, None]:
    """Yield what to overwrite; raise before the end if the result would not be the manifest's.

    Args:
        base: of the version that a delta is applied to; None: everything is carried, whatever stood there.
        on_changed: told after every tensor how many of its units change.

    Raises:
        VerifyError, FormatError: bits, or the number of changes, are not what the manifest says.
    """
    for meta, pieces in by_tensor(decoded):
        entry = manifest.by_name[meta.name]
        total = ZERO if base is None else base.by_name[meta.name].fingerprint
        changed = 0
        for piece in pieces:
            if piece.record is not None:
                yield piece.record
            total += piece.fingerprint
            changed += piece.changed
        if base is not None and changed != entry.changed:
            raise FormatError(
                f"tensor {meta.name!r}: the manifest announces {entry.changed} changed units, "
                f"its payload changes {changed}",
                tensor=meta.name,
            )
        check_fingerprint(entry, total)
        on_changed(changed)


def proved_spans(
    pieces: Iterable[DecodedSpan], manifest: Manifest, on_changed: OnChanged
) -> Generator[tuple[TensorMeta, Iterator[Span]], None, None]:
    """Yield the tensors of a full version, each proved at the end of its spans; raises as `proved`."""
    for meta, spans in by_tensor(pieces):
        yield meta, _spans(manifest.by_name[meta.name], spans, on_changed)


def _spans(
    entry: TensorEntry, pieces: Iterator[DecodedSpan], on_changed: OnChanged
) -> Iterator[Span]:
    total = ZERO
    for piece in pieces:
        if piece.span is not None:
            on_changed(piece.span.bits.size)
            yield piece.span
        total += piece.fingerprint
    check_fingerprint(entry, total)


def check_fingerprint(entry: TensorEntry, found: Fingerprint) -> None:
    """Check that a tensor's new bits are the manifest's.

    Raises:
        VerifyError: they are not; nothing was written yet.
    """
    if found != entry.fingerprint:
        raise VerifyError(
            f"tensor {entry.meta.name!r}: expected fingerprint {entry.fingerprint.hex()}, found "
            f"{found.hex()}: the engine does not hold the base's bits, or the payload is wrong; "
            "nothing was written; repair the engine with sync(repair=True), on disk syncline pull --repair",
            tensor=entry.meta.name,
        )
