"""Move a run from one layout to another: every version followed, written, read back and compared.

Two copies of the weights are kept in temporary files: one follows the source, the other what was written.
A version counts as converted when both are the same, bit for bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from syncline import interchange, kernels
from syncline.abc import Interchange, Observe, Store, WeightSource, ignore
from syncline.errors import BaseVersionError, ConfigError, VerifyError
from syncline.format import checkpoint
from syncline.interchange.fireworks import Fireworks
from syncline.sources import CheckpointSource
from syncline.sync.chains import SourceVersion, names_in, one_chain
from syncline.sync.detect import dense_windows
from syncline.sync.layout import AUTO, foreign_layout
from syncline.sync.phases import Phases
from syncline.sync.publisher import Publisher
from syncline.sync.receiver import Receiver
from syncline.sync.snapshot import Snapshot
from syncline.types import WINDOW_UNITS, Bits, Step, TensorMeta, Window
from syncline.version import ForeignVersion, Kind

STEPS = ("convert.version",)

_DELTA_SETTINGS: Mapping[str, tuple[str, str]] = {
    "slime": ("xor", "xxh3-128"),
    "fireworks": ("arc_v2", "adler32"),
}
"""Encoding and checksum of deltas where none are asked for."""


@dataclass(frozen=True, slots=True)
class ConvertedVersion:
    """One version that was moved: what it is called here and there, and what it costs."""

    source: str
    target: str
    kind: Kind
    changed: int
    source_bytes: int
    target_bytes: int


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        source, target: names of the layouts.
        versions: what was moved, in order; every one was read back and is the same bit for bit.
        missing: guarantees that the source's layout did not give.
        seconds: time by phase.
    """

    source: str
    target: str
    versions: tuple[ConvertedVersion, ...]
    missing: tuple[str, ...]
    seconds: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def convert(
    source: Store,
    target: Store,
    to: str,
    *,
    layout: str = AUTO,
    base: str | PathLike[str] | None = None,
    encoding: str | None = None,
    checksum: str | None = None,
    work_dir: str | PathLike[str] | None = None,
    observe: Observe = ignore,
) -> ConversionReport:
    """Write every version of a run into an empty store in another layout, and prove each of them.

    Args:
        to: `syncline`, or a foreign layout that is written (`slime`, `fireworks`).
        layout: what the source is in; `auto`: what lies there.
        base: the checkpoint on which the first version was made, where that is a delta. For `fireworks` its
            files are mirrored too.
        encoding, checksum: of deltas; None: what the target's readers take most widely.
        work_dir: where the two copies of the weights lie, in unnamed temporary files; None: the
            system's directory for such files.

    Raises:
        ConfigError: the target is not empty or is not written, or a base is needed and not given.
        BaseVersionError: the source has no version, or its versions are no single chain.
        CodecError: a tensor cannot be said in the target's encoding.
        VerifyError: what was written does not read back as the same bits.
        Others out of reading the source. After any error the target holds the versions before it; empty it
        before another try.

    Cost: for every version one pass over the model and one over what was written. Disk: twice the weights;
    three times with `to="syncline"`. Memory: a window, and what the readers need for one payload.

    Example:
        >>> import numpy as np, syncline
        >>> ours, theirs = syncline.MemoryStore(), syncline.MemoryStore()
        >>> publisher = syncline.Publisher(ours)
        >>> for value in (1.0, 2.0):
        ...     _ = publisher.publish({"w": np.full(9, value, np.float32)})
        >>> report = syncline.convert(ours, theirs, "slime")
        >>> [(item.target, item.kind) for item in report.versions]
        [('000001', 'full'), ('000002', 'delta')]
    """
    phases = Phases()
    found = foreign_layout(source, layout)
    writer = _writer(to, base)
    if target.list():
        raise ConfigError(
            f"the target holds {len(target.list())} objects already; expected an empty store or a path that "
            "does not exist yet"
        )
    versions = one_chain(source, found)
    if versions[0].kind == "delta" and base is None:
        raise ConfigError(
            f"the first version, {versions[0].identity!r}, is a delta on {versions[0].base!r}, which is not in "
            "the source; pass base (--base): the checkpoint that the run began with"
        )
    with ExitStack() as opened:
        directory = opened.enter_context(
            tempfile.TemporaryDirectory(prefix="syncline-convert-", dir=work_dir)
        )
        job = _Conversion(source, found, target, to, writer, Path(directory), phases)
        if versions[0].kind == "delta" and base is not None:
            job.start_from(base)
        job.settings(encoding, checksum)
        names = names_in(versions, to)
        total_bytes = sum(version.payload_bytes for version in versions)
        done: list[ConvertedVersion] = []
        for version in versions:
            done.append(job.step(version, names, done[-1].target if done else None))
            observe(Step(STEPS[0], sum(item.source_bytes for item in done), total_bytes))
    return ConversionReport(
        source=interchange.SYNCLINE if found is None else found.name,
        target=to,
        versions=tuple(done),
        missing=tuple(dict.fromkeys(text for version in versions for text in version.missing)),
        seconds=phases.seconds(),
    )


class _Conversion:
    """The two copies of the weights, and who reads and writes them."""

    def __init__(
        self,
        source: Store,
        layout: Interchange | None,
        target: Store,
        to: str,
        writer: Interchange | None,
        directory: Path,
        phases: Phases,
    ) -> None:
        self._source, self._layout = source, layout
        self._target, self._to, self._writer = target, to, writer
        self._directory = directory
        self._phases = phases
        self._ahead = Snapshot(directory / "source")
        self._behind = Snapshot(directory / "target")
        name = interchange.SYNCLINE if layout is None else layout.name
        self._follow_source = Receiver(source, self._ahead, layout=name)
        self._follow_target = Receiver(target, self._behind, layout=to)
        self._publisher: Publisher | None = None
        self._base: str | PathLike[str] | None = None
        self._encoding, self._checksum = "auto", ""
        self._changed = 0

    def start_from(self, base: str | PathLike[str]) -> None:
        """Put the base checkpoint's weights into both copies."""
        self._base = base
        for copy in (self._ahead, self._behind):
            copy.files = copy.fill(CheckpointSource(base))

    def settings(self, encoding: str | None, checksum: str | None) -> None:
        """Settle how deltas are written.

        Raises:
            ConfigError: the target has no such encoding or checksum.
        """
        if self._writer is None:
            if checksum is not None:
                raise ConfigError(
                    "checksum: a run of Syncline's own has SHA-256 and fingerprints alone"
                )
            self._publisher = Publisher(
                self._target,
                base=self._base,
                snapshot_dir=self._directory / "publisher",
                encoding="auto" if encoding is None else encoding,
                anchor_every=None,
            )
            return
        first, second = _DELTA_SETTINGS[self._to]
        self._encoding = first if encoding is None else encoding
        self._checksum = second if checksum is None else checksum

    def step(
        self, version: SourceVersion, names: Mapping[str, str], before: str | None
    ) -> ConvertedVersion:
        """Move one version.

        Args:
            before: what the version before it is called in the target.
        """
        with self._phases("read"):
            self._follow_source.sync(version.identity)
        with self._phases("write"):
            if self._publisher is not None:
                source = _Held(self._ahead)
                report = self._publisher.publish(source, full=version.kind == "full")
                written, size_bytes = f"{report.version:06d}", report.payload_bytes
                changed = report.changed if report.kind == "delta" else 0
            else:
                self._changed = 0
                at = self._write(version, names, before)
                written, size_bytes, changed = at.identity, at.payload_bytes, self._changed
        with self._phases("verify"):
            self._follow_target.sync(written)
            self._check_same(version, written)
        return ConvertedVersion(
            version.identity, written, version.kind, changed, version.payload_bytes, size_bytes
        )

    def _write(
        self, version: SourceVersion, names: Mapping[str, str], before: str | None
    ) -> ForeignVersion:
        if self._writer is None:
            raise ConfigError(f"layout {self._to}: nothing writes it")
        is_full = version.kind == "full"
        base = None
        if not is_full:
            base = names.get(str(version.base), str(version.base)) if before is None else before
        wanted = ForeignVersion(
            layout=self._to,
            identity=names[version.identity],
            base=base,
            kind=version.kind,
            encoding="raw" if is_full else self._encoding,
            checksum=None if is_full else self._checksum,
        )
        windows: Callable[[TensorMeta], Iterator[Window]] = (
            self._dense if is_full else self._windows
        )
        tensors = ((meta, windows(meta)) for meta in self._ahead.tensors().values())
        files = self._files(version) if is_full else {}
        with self._target.turn():
            return self._writer.write(self._target, wanted, tensors, files)

    def _files(self, version: SourceVersion) -> Mapping[str, bytes]:
        if self._layout is None:
            return self._ahead.files
        for at in self._layout.versions(self._source):
            if at.identity == version.identity:
                return self._layout.files(self._source, at)
        raise BaseVersionError(
            f"version {version.identity!r} was removed from the source meanwhile"
        )

    def _dense(self, meta: TensorMeta) -> Iterator[Window]:
        yield from dense_windows(self._ahead.view(meta.name))

    def _windows(self, meta: TensorMeta) -> Iterator[Window]:
        for start, old, new in _pieces(meta, self._behind, self._ahead):
            window = Window(start, new, *kernels.diff(old, new))
            self._changed += window.offsets.size
            yield window

    def _check_same(self, version: SourceVersion, written: str) -> None:
        found, wanted = self._behind.tensors(), self._ahead.tensors()
        if dict(found) != dict(wanted):
            odd = min(found.keys() ^ wanted.keys(), default="one of another dtype or shape")
            raise VerifyError(
                f"version {written!r} was read back with other tensors than {version.identity!r} has: {odd}"
            )
        for name, meta in wanted.items():
            for start, old, new in _pieces(meta, self._behind, self._ahead):
                if not np.array_equal(old, new):
                    offsets, _, _ = kernels.diff(old, new)
                    raise VerifyError(
                        f"tensor {name!r}: version {written!r} was read back with other bits than "
                        f"{version.identity!r} has, first at unit {start + int(offsets[0])}: the target's "
                        "storage is damaged; empty it and convert again",
                        tensor=name,
                    )


class _Held(WeightSource):
    """The weights that a snapshot holds, as a source."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        """Yield each tensor; see `WeightSource`."""
        for name, meta in self._snapshot.tensors().items():
            yield meta, self._snapshot.view(name)

    def files(self) -> Mapping[str, bytes]:
        """Return the further files that came with the weights."""
        return self._snapshot.files


def _pieces(meta: TensorMeta, old: Snapshot, new: Snapshot) -> Iterator[tuple[int, Bits, Bits]]:
    """Yield where each window begins, and its bits in two copies."""
    before = old.view(meta.name) if meta.name in old.tensors() else None
    after = new.view(meta.name)
    for start in range(0, meta.unit_count, WINDOW_UNITS):
        piece = after[start : start + WINDOW_UNITS]
        yield start, piece[:0] if before is None else before[start : start + WINDOW_UNITS], piece


def _writer(to: str, base: str | PathLike[str] | None) -> Interchange | None:
    """Return the layout to write; None for our own."""
    if to == interchange.SYNCLINE:
        return None
    layout = interchange.get(to)
    if not layout.writes:
        written = [interchange.SYNCLINE, *_DELTA_SETTINGS]
        raise ConfigError(
            f"to: layout {to!r} is only read, since no released receiver reads it; expected one of "
            f"{', '.join(written)}"
        )
    if base is not None and isinstance(layout, Fireworks):
        places = checkpoint.locate(Path(base))
        return Fireworks({name: place.path.name for name, place in places.items()})
    return layout
