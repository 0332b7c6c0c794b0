"""Parts: safetensors files with the payloads of a version, written in one pass, read strictly.

A file is 8 bytes of header length, a JSON header padded with spaces, and the tensors' data in
header order without holes. Payloads are 1-D U8 tensors; raw tensors of encoding `full` keep dtype
and shape, so that any safetensors tool can open a full version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Self

from syncline.abc import Buffer
from syncline.errors import FormatError, StoreError
from syncline.format import names, strict_json
from syncline.format.rules import INTERCHANGE_ENCODINGS
from syncline.format.table import tensor_meta
from syncline.types import TensorMeta
from syncline.version import Kind, Manifest

MAX_HEADER_BYTES = 1 << 26
"""Room for some 400,000 tensors; safetensors itself allows 100 MB."""

_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_KEYS = ("dtype", "shape", "data_offsets")
_SPOOL_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies: bytes `start:stop` of the file."""

    meta: TensorMeta
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a part's header says: a slot for every tensor, and the part's own metadata."""

    slots: Mapping[str, Slot]
    metadata: Mapping[str, str] | None


def payload_meta(name: str, size_bytes: int) -> TensorMeta:
    """Return how a payload of so many bytes appears in a part."""
    return TensorMeta(name, "U8", (size_bytes,))


def metadata_for(kind: Kind, encoding: str, digests: Mapping[str, str]) -> dict[str, str] | None:
    """Return the `__metadata__` of a part.

    Args:
        kind: as in the manifest.
        encoding: as in the manifest.
        digests: XXH3-128 of the new bytes of each tensor in the part, 32 lowercase hex digits; only
            looked at where slime-family readers can follow.
    """
    if kind == "full":
        return {"format": "pt"}
    return dict(sorted(digests.items())) if encoding in INTERCHANGE_ENCODINGS else None


def encode(
    tensors: Sequence[TensorMeta],
    chunks_of: Callable[[str], Iterable[Buffer]],
    metadata: Mapping[str, str] | None = None,
) -> Iterator[Buffer]:
    """Yield a part's bytes; tensors with the widest elements come first, so that all are aligned.

    Args:
        tensors: what the part holds, with sizes that are known beforehand.
        chunks_of: returns the bytes of the tensor with this name; called once each, in file order.
        metadata: see `metadata_for`.

    Raises:
        FormatError: a name twice or illegal, or chunks that are not as long as the tensor.

    Memory: O(one chunk). Aliasing: chunks are passed on as they come.
    """
    ordered = sorted(tensors, key=lambda meta: (-meta.unit_bytes, meta.name))
    yield _header(ordered, metadata)
    for meta in ordered:
        found_bytes = 0
        for chunk in chunks_of(meta.name):
            found_bytes += memoryview(chunk).nbytes
            yield chunk
        if found_bytes != meta.nbytes:
            raise FormatError(
                f"tensor {meta.name!r} must be {meta.nbytes} bytes long, found {found_bytes}",
                tensor=meta.name,
            )


@contextmanager
def temporary_file() -> Iterator[None]:
    """Turn the system's refusal of a temporary file into `StoreError`; put no other I/O inside."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"a temporary file cannot be written: {error.strerror}; make room, or set TMPDIR to a "
            "directory that has some"
        ) from error


class Spool:
    """Collects payloads whose sizes are not known beforehand; on disk once they outgrow memory.

    Args:
        memory_bytes: how much is kept in memory before a temporary file takes over.

    Example:
        >>> with Spool() as spool:
        ...     spool.add("a", [b"12", b"3"])
        ...     part = b"".join(spool.chunks())
        >>> part[-3:]
        b'123'
    """

    def __init__(self, memory_bytes: int = 1 << 26) -> None:
        self._file: IO[bytes] = SpooledTemporaryFile(memory_bytes)  # noqa: SIM115 - `close` does
        self._slots: dict[str, Slot] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size_bytes(self) -> int:
        """Bytes of all payloads so far."""
        return self._file.seek(0, 2)

    def add(self, name: str, chunks: Iterable[Buffer], meta: TensorMeta | None = None) -> None:
        """Take the payload of one tensor.

        Args:
            name: the tensor's canonical name.
            chunks: the payload; if they raise, the payload is dropped and the spool is as before.
            meta: the tensor's own meta if these are its raw bytes; None for a payload.

        Raises:
            FormatError: the name is taken.
            StoreError: the system has no room for the temporary file.
        """
        if name in self._slots:
            raise FormatError(f"tensor {name!r} is in this part already", tensor=name)
        start = self.size_bytes
        try:
            for chunk in chunks:
                with temporary_file():
                    self._file.write(chunk)
            with temporary_file():
                stop = self.size_bytes
        except BaseException:
            with suppress(OSError):  # what was buffered cannot be written either
                self._file.truncate(start)
            raise
        kept = payload_meta(name, stop - start) if meta is None else meta
        self._slots[name] = Slot(kept, start, stop)

    def drop(self, name: str) -> None:
        """Forget the payload that was added last.

        Raises:
            FormatError: `name` was not added last.
        """
        slot = self._slots.get(name)
        if slot is None or slot.stop != self.size_bytes:
            raise FormatError(f"tensor {name!r} is not the last one of this part", tensor=name)
        self._file.truncate(slot.start)
        del self._slots[name]

    def close(self) -> None:
        """Free memory and temporary file."""
        with suppress(OSError):  # what it still had to write is of no use any more
            self._file.close()

    def chunks(self, metadata: Mapping[str, str] | None = None) -> Iterator[Buffer]:
        """Yield the part's bytes.

        Raises:
            FormatError: as `encode`.
        """
        return encode([slot.meta for slot in self._slots.values()], self._read, metadata)

    def _read(self, name: str) -> Iterator[bytes]:
        slot = self._slots[name]
        for start in range(slot.start, slot.stop, _SPOOL_PIECE_BYTES):
            self._file.seek(start)
            yield self._file.read(min(_SPOOL_PIECE_BYTES, slot.stop - start))


def header_bytes(start: Buffer, size_bytes: int, where: str) -> int:
    """Return how many bytes from the file's start `read_header` needs.

    Args:
        start: the file's first bytes, at least 8.
        size_bytes: size of the whole file.
        where: what messages call the file.

    Raises:
        FormatError: the header's length is more than the file holds, or than is allowed.
    """
    if size_bytes < _LENGTH_BYTES:
        raise FormatError(
            f"{where}: a safetensors file has at least {_LENGTH_BYTES} bytes, found {size_bytes}"
        )
    length_bytes = int.from_bytes(memoryview(start)[:_LENGTH_BYTES], "little")
    most_bytes = min(MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES)
    if length_bytes > most_bytes:
        raise FormatError(
            f"{where}: the header length must be at most {most_bytes}, found {length_bytes}"
        )
    return _LENGTH_BYTES + length_bytes


def read_header(start: Buffer, size_bytes: int, where: str) -> Header:
    """Return what the header says, if its slots tile the whole data of the file.

    Args:
        start: the file's first bytes, at least as many as `header_bytes` says.
        size_bytes: size of the whole file.
        where: what messages call the file.

    Raises:
        FormatError: anything that `docs/reference/format.md`, section 4, does not allow: a hole, an
            overlap, an unknown key, data that is longer or shorter than the file.
    """
    data_start = header_bytes(start, size_bytes, where)
    text = bytes(memoryview(start)[_LENGTH_BYTES:data_start])
    if not text.startswith(b"{") or data_start % _ALIGNMENT_BYTES:
        raise FormatError(
            f"{where}: the header must begin with '{{' and end on a multiple of {_ALIGNMENT_BYTES} "
            f"bytes, found {text[:1]!r} and {data_start}"
        )
    document = strict_json.members(
        strict_json.parse(text, where, limit_bytes=MAX_HEADER_BYTES), where
    )
    metadata = None
    if names.METADATA in document:
        metadata = _metadata(document.pop(names.METADATA), where)
    slots: dict[str, Slot] = {}
    position = data_start
    for name, row in document.items():
        slots[name] = slot = _slot(name, row, position, data_start, where)
        position = slot.stop
    if position != size_bytes:
        raise FormatError(f"{where}: the data must end at byte {size_bytes}, it ends at {position}")
    return Header(slots, metadata)


def load(part: Buffer, manifest: Manifest, index: int) -> dict[str, memoryview]:
    """Return the payloads in part `index` of a version by tensor name.

    Args:
        part: the whole file, bytes or memory map; its digest has been checked.
        manifest: the version's.
        index: which of its parts.

    Raises:
        FormatError: not exactly the tensors that the manifest puts there, or not as it says.

    Aliasing: the results are read-only views of `part`.
    """
    view = memoryview(part).cast("B").toreadonly()
    header = read_header(view, view.nbytes, manifest.parts[index].path)
    check_slots(header, manifest, index)
    return {name: view[slot.start : slot.stop] for name, slot in header.slots.items()}


def check_slots(header: Header, manifest: Manifest, index: int) -> None:
    """Check that part `index` holds exactly what the manifest puts there.

    Raises:
        FormatError: a tensor is missing, too many, or has another dtype or shape.
    """
    where = manifest.parts[index].path
    expected = {entry.meta.name: entry for entry in manifest.tensors if entry.part == index}
    for name in sorted(expected.keys() ^ header.slots.keys()):
        fault = "is missing" if name in expected else "is there, but not in the manifest's table"
        raise FormatError(f"{where}: tensor {name!r} {fault}", tensor=name)
    for name, entry in expected.items():
        found = header.slots[name].meta
        meta = entry.meta if entry.encoding == "full" else payload_meta(name, found.nbytes)
        if found != meta:
            raise FormatError(
                f"{where}: tensor {name!r} must be {meta.dtype} {list(meta.shape)}, found "
                f"{found.dtype} {list(found.shape)}",
                tensor=name,
            )


def _header(tensors: Sequence[TensorMeta], metadata: Mapping[str, str] | None) -> bytes:
    document: dict[str, Any] = {}
    if metadata is not None:
        document[names.METADATA] = dict(metadata)
    offset = 0
    for meta in tensors:
        names.check_tensor(meta.name, "a tensor in a part")
        if meta.name in document:
            raise FormatError(f"tensor {meta.name!r} is in this part already", tensor=meta.name)
        document[meta.name] = {
            "dtype": meta.dtype,
            "shape": list(meta.shape),
            "data_offsets": [offset, offset + meta.nbytes],
        }
        offset += meta.nbytes
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _metadata(value: object, where: str) -> dict[str, str]:
    metadata = strict_json.members(value, f"{where}: {names.METADATA}")
    for key, text in metadata.items():
        if not isinstance(text, str):
            raise FormatError(
                f"{where}: {names.METADATA}.{key:.80} must be a string, found {text!r:.80}"
            )
    return metadata


def _slot(name: str, row: object, position: int, data_start: int, where: str) -> Slot:
    """Return where a tensor lies, if that begins at `position` and is as long as the tensor."""
    path = f"tensor {name!r:.80}"
    names.check_tensor(name, f"{where}: a key of the header")
    fields = strict_json.Fields(row, where, _KEYS, path)
    meta = tensor_meta(name, fields["dtype"], fields["shape"], where, path)
    start = position - data_start
    place = fields.place("data_offsets")
    found = [strict_json.integer(offset, place) for offset in fields.items("data_offsets")]
    if found != [start, start + meta.nbytes]:
        fields.refuse("data_offsets", f"{[start, start + meta.nbytes]}, without hole or overlap")
    return Slot(meta, position, position + meta.nbytes)
