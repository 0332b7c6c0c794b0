"""The engine's side of a live path: wait for a version, prove it as it comes, and commit when all can."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from typing import TypeVar

from syncline.abc import Channel, Engine, Inlet, Observe
from syncline.errors import (
    BaseVersionError,
    CommitError,
    ConfigError,
    FormatError,
    PeerLostError,
    SynclineError,
    TransportError,
    TransportTimeoutError,
    VerifyError,
)
from syncline.format import cargo as cargo_format
from syncline.format import digest, names, strict_json
from syncline.format import manifest as manifest_format
from syncline.format.bucket import Cargo
from syncline.sync.checks import check_layout, check_link, verify_engine
from syncline.sync.decode import DeltaDecoder
from syncline.sync.history import is_same_weights
from syncline.sync.live import messages
from syncline.sync.live.arriving import Arriving
from syncline.sync.live.lanes import lanes_of
from syncline.sync.live.messages import Message
from syncline.sync.phases import Phases
from syncline.sync.proof import proved, proved_spans
from syncline.types import Record, Span, Step, TensorMeta
from syncline.version import HeldVersion, Kind, Manifest

STEPS = (
    "take.offered",
    "take.answered",
    "take.loading",
    "take.bucket",
    "take.voted",
    "take.applied",
    "take.done",
)

T = TypeVar("T")


class Taker:
    """Takes one version from a live path into an engine.

    Args:
        verify: `full` reads all weights again before the trainer hears that they are in.

    Attributes:
        kind: what came: `full`, `delta`, or None if the engine held the version already.
        changed: units that were overwritten; `payload_bytes`: of the buckets; `wire_bytes`: of these,
            and of manifests and files.
    """

    def __init__(
        self, inlet: Inlet, engine: Engine, phases: Phases, observe: Observe, verify: str
    ) -> None:
        self._verify = verify
        self._inlet = inlet
        self._engine = engine
        self._phases = phases
        self._observe = observe
        self._channel: Channel | None = None
        self._generation = 0
        self._is_decided = False
        self.kind: Kind | None = None
        self.changed = 0
        self.payload_bytes = self.wire_bytes = 0

    def take(self, *, repair: bool) -> HeldVersion:
        """Wait for the next version that the trainer delivers, and return it when the engine holds it.

        A round that breaks because somebody else died is waited out, and the next one is taken.

        Args:
            repair: take all weights, whatever the engine says that it holds.

        Raises:
            TransportTimeoutError, PeerLostError: no version came in time; the trainer died.
            CommitError: another engine could not take the version, so none does.
            VerifyError, FormatError, LayoutError, BaseVersionError: this one cannot.
        """
        deadline_s = time.monotonic() + self._inlet.timeout_s
        self._channel = self._inlet.channel()
        try:
            while True:
                with self._phases("wait"):
                    left_s = max(0.0, deadline_s - time.monotonic())
                    offer = messages.receive(self._channel, (messages.OFFER,), None, left_s)
                self._observe(Step("take.offered"))
                held = self._attempt(offer, repair=repair)
                if held is not None:
                    return held
        except (PeerLostError, KeyboardInterrupt, SystemExit):
            self._inlet.close()  # gives the trainer's memory back; the next call joins again
            raise

    def _attempt(self, offer: Message, *, repair: bool) -> HeldVersion | None:
        """Take what is offered; None if the round broke without a fault of this engine or the trainer."""
        try:
            return self._take(offer, repair=repair)
        except _AgainError:
            return None
        except _ToldError as error:
            raise error.cause from None
        except (TransportTimeoutError, PeerLostError) as error:
            self._vote(error, is_own=False)  # raises if the trainer is gone
        except Exception as error:
            with suppress(TransportError):  # what happened here is what is to be raised
                if self._is_decided:
                    self._send(messages.DONE, {"error": _text(error)})
                else:
                    self._vote(error, is_own=True)
            raise
        try:
            _obey(self._hear((messages.VERDICT,)))
        except _AgainError:
            return None
        except _ToldError as error:
            raise error.cause from None
        raise FormatError("the trainer told to commit what it never sent")

    def _take(self, offer: Message, *, repair: bool) -> HeldVersion:
        self._generation = offer.generation
        self.wire_bytes += sum(map(len, offer.blobs))
        self._is_decided = False
        at = _offered(offer)
        held = None if repair else self._engine.held()
        if held is not None and held.manifest.run_id != at.manifest.run_id:
            raise BaseVersionError(
                f"the engine follows run {held.manifest.run_id} at version {held.version}, the trainer "
                f"delivers run {at.manifest.run_id}; use a fresh engine, or move this one over with "
                "sync(repair=True)",
                version=held.version,
            )
        is_there = held is not None and held.sha256 == at.sha256
        if held is not None and is_same_weights(at) and held.sha256 == at.manifest.base_sha256:
            self._engine.apply((), at)
            is_there = True
        wants = "nothing" if is_there else self._wanted(held, at, offer)
        self._send(
            messages.ANSWER,
            {"wants": wants, "needs_files": not self._engine.tensors() and not is_there},
        )
        self._observe(Step("take.answered"))
        if is_there:
            return at
        load = self._hear((messages.LOAD, messages.VERDICT))
        if load.kind == messages.VERDICT:
            _obey(load)
            raise FormatError("the trainer told to commit what it never sent")
        base = held.manifest if held is not None and wants == "delta" else None
        self._load(load, at, base)
        return at

    def _wanted(self, held: HeldVersion | None, at: HeldVersion, offer: Message) -> Kind:
        allowed = offer.fields.items("allowed")
        manifest = at.manifest
        is_next = held is not None and held.sha256 == manifest.base_sha256
        if manifest.kind == "delta" and is_next and "delta" in allowed:
            return "delta"
        if "full" not in allowed:
            found = "no version" if held is None else f"version {held.version}"
            raise BaseVersionError(
                f"the trainer delivers the delta from version {manifest.base_version} alone, the engine holds "
                f"{found}; bring it there from the store, or let the trainer send full versions, too"
            )
        return "full"

    def _load(self, load: Message, at: HeldVersion, base: Manifest | None) -> None:
        cargo = cargo_format.load(load.blobs[0]) if load.blobs else None
        if cargo is None:
            raise FormatError("the trainer's load says nothing of its buckets")
        self.wire_bytes += sum(map(len, load.blobs))
        _check_cargo(cargo, at, self._generation, "full" if base is None else "delta")
        files = _files(load)
        metas = self._engine.tensors()
        if metas:
            check_layout(metas, at.manifest)
        if base is not None:
            check_link(at.manifest, base)
        lanes = lanes_of(load.fields, self._inlet, sum(each.nbytes > 0 for each in cargo.buckets))
        self.kind = cargo.kind
        self._send(messages.READY, {})
        self._observe(Step("take.loading", 0, cargo.nbytes))
        arriving = Arriving(lanes, cargo, self._phases, self._arrived)
        try:
            self._into_engine(arriving, at, base, files if not metas else None)
        except BaseException:
            arriving.abandon()
            raise
        self._observe(Step("take.applied"))
        if self._verify == "full":
            with self._phases("verify"):
                verify_engine(self._engine, at.manifest)
        with suppress(TransportError):  # the version is in; the next call finds out who is gone
            self._send(messages.DONE, {"error": None})
        self._observe(Step("take.done"))

    def _into_engine(
        self,
        arriving: Arriving,
        at: HeldVersion,
        base: Manifest | None,
        files: Mapping[str, bytes] | None,
    ) -> None:
        """Let the engine take what arrives; `files` is None if it holds tensors already."""
        if files is not None:
            with self._phases("apply"), closing(self._tensors(arriving, at)) as tensors:
                self._engine.create(at, self._committing(tensors), files)
            return
        with self._phases("apply"), closing(self._records(arriving, at, base)) as records:
            self._engine.apply(self._committing(records), at)

    def _records(
        self, arriving: Arriving, at: HeldVersion, base: Manifest | None
    ) -> Generator[Record, None, None]:
        if base is None:
            decoded = arriving.decoded(self._engine.view)
            with closing(decoded):
                yield from proved(decoded, at.manifest, None, self._proved)
            return
        decoder = DeltaDecoder(self._engine.view, base, self._phases)
        with (
            closing(arriving.payloads(at.manifest)) as payloads,
            closing(decoder.decode(payloads)) as decoded,
        ):
            yield from proved(decoded, at.manifest, base, self._proved)

    def _tensors(
        self, arriving: Arriving, at: HeldVersion
    ) -> Generator[tuple[TensorMeta, Iterator[Span]], None, None]:
        with closing(arriving.spans()) as spans:
            yield from proved_spans(spans, at.manifest, self._proved)

    def _proved(self, changed: int) -> None:
        self.changed += changed

    def _arrived(self, nbytes: int) -> None:
        self.payload_bytes += nbytes
        self.wire_bytes += nbytes
        self._observe(Step("take.bucket", self.payload_bytes))

    def _committing(self, items: Iterable[T]) -> Iterator[T]:
        """Pass everything on; at the end, when all is proved, vote, and wait for what all others say."""
        yield from items
        self._send(messages.VOTE, {"error": None, "is_own": False})
        self._observe(Step("take.voted"))
        with self._phases("wait"):
            _obey(self._hear((messages.VERDICT,)))
        self._is_decided = True

    def _vote(self, error: Exception, *, is_own: bool) -> None:
        text = (
            str(error) if isinstance(error, SynclineError) else f"{type(error).__name__}: {error}"
        )
        self._send(messages.VOTE, {"error": text, "is_own": is_own})

    def _open_channel(self) -> Channel:
        if self._channel is None:
            raise PeerLostError("no trainer: nothing was taken yet")
        return self._channel

    def _send(self, kind: str, fields: Mapping[str, object]) -> None:
        try:
            messages.send(self._open_channel(), kind, self._generation, fields)
        except ConfigError as error:  # another thread has closed the inlet
            raise PeerLostError(f"this engine has left: {error}") from error

    def _hear(self, kinds: tuple[str, ...]) -> Message:
        return messages.receive(
            self._open_channel(), kinds, self._generation, self._inlet.timeout_s
        )


class _AgainError(SynclineError):
    """The round was called off, and another one follows."""


class _ToldError(SynclineError):
    """The trainer said why there is no commit, so it needs no vote from here."""

    def __init__(self, cause: CommitError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, SynclineError) else f"{type(error).__name__}: {error}"


def _obey(verdict: Message) -> None:
    if verdict.fields["error"] is None:
        return
    text = verdict.fields.text("error")
    if verdict.fields["again"] is True:
        raise _AgainError(text)
    raise _ToldError(CommitError(f"the trainer called the version off: {text}"))


def _offered(offer: Message) -> HeldVersion:
    """Return the version that an offer names, checked against its digest."""
    has_table = offer.fields["has_table"] is True
    if len(offer.blobs) != 1 + has_table:
        raise FormatError(f"an offer came with {len(offer.blobs)} files, expected {1 + has_table}")
    sha256 = offer.fields.hexadecimal("sha256", 64)
    found = digest.sha256(offer.blobs[0])
    if found != sha256:
        raise VerifyError(f"the offered manifest: expected sha256 {sha256}, found {found}")
    table = offer.blobs[1] if has_table else None
    return HeldVersion(manifest_format.load(offer.blobs[0], table, "the offered manifest"), sha256)


def _check_cargo(cargo: Cargo, at: HeldVersion, generation: int, kind: Kind) -> None:
    """Check that the buckets hold exactly what the version says, before the first one comes.

    Raises:
        FormatError: they do not.
    """
    manifest = at.manifest
    found = (cargo.run_id, cargo.version, cargo.manifest_sha256, cargo.generation, cargo.kind)
    wanted = (manifest.run_id, manifest.version, at.sha256, generation, kind)
    if found != wanted:
        raise FormatError(f"cargo: expected {wanted}, found {found}")
    if kind == "full":
        metas = {entry.meta.name: entry.meta for entry in manifest.tensors}
        if dict(cargo.metas) != metas:
            raise FormatError("cargo: its tensors are not those of the version")
        return
    carried = {entry.meta.name for entry in manifest.tensors if entry.encoding is not None}
    if cargo.metas.keys() != carried:
        raise FormatError("cargo: its payloads are not those of the version")


def _files(load: Message) -> dict[str, bytes]:
    """Return the further files that came along, checked."""
    rows = load.fields.items("files")
    if len(load.blobs) != len(rows) + 1:
        raise FormatError(f"a load came with {len(load.blobs) - 1} files, expected {len(rows)}")
    files = {}
    for index, (row, raw) in enumerate(zip(rows, load.blobs[1:], strict=True)):
        fields = strict_json.Fields(
            row, "a load", ("path", "size_bytes", "sha256"), f"files[{index}]"
        )
        path = fields.text("path")
        names.check_file(path, fields.place("path"))
        if digest.sha256(raw) != fields.hexadecimal("sha256", 64):
            raise VerifyError(f"file {path}: it is not the one that the trainer digested")
        files[path] = raw
    return files
