"""A whole version on its way into an empty engine: every tensor once, every unit once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from syncline.errors import LayoutError
from syncline.types import Span, TensorMeta, unsigned
from syncline.version import HeldVersion

Tensors = Iterable[tuple[TensorMeta, Iterable[Span]]]


def each_once(held: HeldVersion, tensors: Tensors) -> Iterator[tuple[TensorMeta, Iterator[Span]]]:
    """Pass a version's tensors on while checking that all of them come, once, as its manifest says.

    The spans of a tensor are to be taken before the next tensor is asked for.

    Raises:
        LayoutError: a tensor is unknown, repeated, missing or of another dtype or shape, or its spans
            do not tile it.
    """
    entries = held.manifest.by_name
    seen: set[str] = set()
    for meta, spans in tensors:
        if meta.name in seen:
            raise LayoutError(f"tensor {meta.name!r} came twice", tensor=meta.name)
        entry = entries.get(meta.name)
        if entry is None or entry.meta != meta:
            expected = "no such tensor" if entry is None else f"{entry.meta}"
            raise LayoutError(
                f"version {held.version} has {expected}, found {meta}", tensor=meta.name
            )
        seen.add(meta.name)
        yield meta, _tiled(meta, spans)
    missing = sorted(entries.keys() - seen)
    if missing:
        raise LayoutError(
            f"{len(missing)} tensors of version {held.version} did not come, among them {missing[0]!r}",
            tensor=missing[0],
        )


def _tiled(meta: TensorMeta, spans: Iterable[Span]) -> Iterator[Span]:
    position = 0
    for span in spans:
        stop = span.start + span.bits.size
        if span.bits.dtype != unsigned(meta.unit_bytes) or span.start != position:
            raise LayoutError(
                f"tensor {meta.name!r}: expected units of {meta.unit_bytes} bytes from {position} on, "
                f"found {span.bits.dtype} from {span.start} on",
                tensor=meta.name,
            )
        if stop > meta.unit_count:
            raise LayoutError(
                f"tensor {meta.name!r}: unit {stop - 1} does not lie in its {meta.unit_count} units",
                tensor=meta.name,
            )
        yield span
        position = stop
    if position != meta.unit_count:
        raise LayoutError(
            f"tensor {meta.name!r}: only {position} of {meta.unit_count} units came",
            tensor=meta.name,
        )
