"""The leader of a sharded publish: owns the store, merges what the ranks wrote, and commits."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.abc import Observe, Store
from syncline.errors import (
    BaseVersionError,
    ConfigError,
    FormatError,
    OutcomeUnknownError,
    PlanDisagreementError,
    SynclineError,
    TransportError,
)
from syncline.format import strict_json
from syncline.layouts import Layout, check
from syncline.layouts.coverage import holders
from syncline.sync.fetch import files_of, manifest_bytes
from syncline.sync.live import Goods
from syncline.sync.live.goods import Sender
from syncline.sync.options import PublisherOptions
from syncline.sync.ownership import Ownership
from syncline.sync.phases import Phases
from syncline.sync.publisher import report_of
from syncline.sync.sharded.answers import PROOF_KEYS, Answer, fields_of
from syncline.sync.sharded.changes import Moved, nothing, unpack
from syncline.sync.sharded.part import Drift, Result, drift_error
from syncline.sync.writer import VersionWriter, model_fingerprint
from syncline.types import ZERO, Fingerprint
from syncline.version import HeldVersion, Kind, Manifest, PartEntry, TensorEntry


class Leader:
    """Takes the store over, and commits one version after the other.

    Raises: as `Ownership`; CoverageError: the layout does not name every element as it should.
    """

    def __init__(
        self, store: Store, layout: Layout, options: PublisherOptions, observe: Observe
    ) -> None:
        check(layout)
        self._store = store
        self._layout = layout
        self._options = options
        self._observe = observe
        self._owner = Ownership(store, observe)
        self._owner.remove_leftovers()
        self._files: Mapping[str, bytes] = {}
        self._base: HeldVersion | None = None
        self._deltas = 0
        self._copies: list[Moved] = []
        self.lanes: tuple[str, ...] = ()
        self.payloads: dict[str, int] = {}

    def goods(self, sender: Sender) -> Goods:
        """Return the current version as a live path takes it.

        Raises:
            ConfigError: there is none yet. StoreError: its manifest cannot be read back.
        """
        if self._base is None:
            raise ConfigError("expected a version to deliver, found none")
        kinds: tuple[Kind, ...] = ("full", "delta") if self.payloads else ("full",)
        return Goods(
            self._base, manifest_bytes(self._store, self._base), kinds, sender, self._files
        )

    def start(self, proofs: list[bytes], files: Mapping[str, bytes] | None) -> bytes:
        """Return where ranks begin, if what all of them hold together is the store's current version.

        Args:
            files: the checkpoint's further files, where there is one; else those of the run.

        Raises:
            PlanDisagreementError: ranks have different layouts.
            BaseVersionError: what they hold is another version, or none is given where there is one.
        """
        head, history = self._owner.head, self._owner.history()
        total = _total(proofs)
        self.lanes = _lanes(proofs)
        self._base = history.current
        self._files = files_of(history) if files is None else files
        if self._base is not None:
            self._deltas = history.deltas_since_full()
            self._check_base(total)
        return strict_json.dump(
            {
                "run_id": head.run_id,
                "epoch": head.epoch,
                "version": head.version,
                "sha256": head.manifest_sha256,
            }
        )

    def commit(self, results: list[bytes], phases: Phases) -> bytes:
        """Make one version of what all ranks wrote, and commit it.

        Raises:
            OutcomeUnknownError: the store does not say whether it was committed.
            SynclineError: it was not.
        """
        found = [Result.load(raw, f"result of rank {rank}") for rank, raw in enumerate(results)]
        drifted = [drift for result in found for drift in result.drifted]
        if drifted:
            self.clean()
            return Answer(None, drift=drifted[0]).dump()
        entries = sorted(
            (entry for result in found for entry in result.tensors),
            key=lambda entry: entry.meta.name,
        )
        if [entry.meta.name for entry in entries] != sorted(self._layout.catalog):
            raise FormatError("the ranks' tables together are not the layout's tensors, each once")
        parts = [result.part for result in found if result.part is not None]
        kind: Kind = "full" if self._is_full(entries) else "delta"
        with phases("commit"), self._store.turn():
            version = self._commit(kind, sorted(parts, key=lambda part: part.path), entries, phases)
        self._deltas = 0 if kind == "full" else self._deltas + 1
        self.payloads = {name: n for result in found for name, n in result.payloads.items()}
        every = self._options.anchor_every
        is_due = every is not None and self._deltas >= every
        return Answer(report_of(version), is_due).dump()

    def clean(self) -> None:
        """Remove what ranks wrote into a version that is not committed."""
        try:
            self._owner.remove_leftovers()
        except SynclineError:
            return  # ranks remove their own parts, and the next publisher what is left then

    def judge(self, drift: Drift, results: list[bytes]) -> None:
        """Take what one of two drifted copies holds; with the second, raise.

        Raises:
            VerifyError: names ranks and elements.
        """
        catalog = self._layout.catalog
        for rank, raw in enumerate(results):
            if raw:
                told = unpack(raw, catalog, f"copy of rank {rank}")
                self._copies.extend(told.moved.get(drift.name, [nothing(catalog[drift.name].meta)]))
        if len(self._copies) == 2:
            one, other = self._copies
            self._copies = []
            pairs = list(holders(self._layout)[drift.name].values())[drift.box]
            ranks = [pairs[copy][0] for copy in (drift.first, drift.second)]
            raise drift_error(drift, ranks, one, other)

    @staticmethod
    def _is_full(entries: list[TensorEntry]) -> bool:
        return all(entry.encoding is not None and entry.changed is None for entry in entries)

    def _check_base(self, total: Fingerprint | None) -> None:
        held = self._base
        if held is None or (total is not None and total == held.manifest.fingerprint):
            return
        problem = "no base was given" if total is None else "base holds other weights"
        raise BaseVersionError(
            f"the store's current version is {held.version}, but {problem}: bring a checkpoint of the "
            "model to it with syncline pull, and give that directory as base to every rank",
            version=held.version,
        )

    def _commit(
        self, kind: Kind, parts: list[PartEntry], entries: list[TensorEntry], phases: Phases
    ) -> HeldVersion:
        head, number = self._owner.head, self._owner.next_version
        writer = VersionWriter(self._store, number, phases, self._observe, self._owner.check)
        files = []
        if kind == "full":
            files = [
                writer.put(path, [content], "publish.file_written")
                for path, content in sorted(self._files.items())
            ]
        before = None if self._base is None else self._base.manifest.fingerprint
        manifest = Manifest(
            run_id=head.run_id,
            epoch=head.epoch,
            version=number,
            kind=kind,
            base_version=head.version,
            base_sha256=head.manifest_sha256,
            encoding=self._options.encoding,
            parts=tuple(parts),
            files=tuple(files),
            tensors=tuple(entries),
            fingerprint_before=before,
            fingerprint=model_fingerprint(entries),
        )
        version = writer.finish(manifest, self._options.checksum)
        try:
            self._owner.commit(version)
        except TransportError as error:
            self._find_out(version, error)
        self._base = version
        return version

    def _find_out(self, version: HeldVersion, lost: TransportError) -> None:
        """Return if HEAD names the version after all, its answer having got lost; else raise."""
        try:
            self._owner.check()
        except TransportError as error:
            raise OutcomeUnknownError(
                f"version {version.version} is written, but the store does not say whether it became the "
                f"current one: {error}; make new publishers on all ranks"
            ) from error
        if self._owner.head.manifest_sha256 != version.sha256:
            raise lost


def _lanes(proofs: list[bytes]) -> tuple[str, ...]:
    """Return where engines join the ranks behind the first; nothing where there is no live path."""
    told = [fields_of(raw, "a rank's beginning", PROOF_KEYS) for raw in proofs]
    addresses = [None if fields["live"] is None else fields.text("live") for fields in told]
    found = tuple(address for address in addresses if address is not None)
    if found and len(found) < len(proofs):
        without = [rank for rank, address in enumerate(addresses) if address is None]
        raise PlanDisagreementError(
            f"live: expected an outlet on every rank or on none, ranks {without} have none"
        )
    if len(set(found)) < len(found):
        raise PlanDisagreementError(
            f"live: expected an address of its own for every rank, found {list(found)}"
        )
    return found[1:]


def _total(proofs: list[bytes]) -> Fingerprint | None:
    """Return the fingerprint of what all ranks hold together; None if they hold nothing yet."""
    layouts: set[str] = set()
    total: Fingerprint | None = ZERO
    for rank, raw in enumerate(proofs):
        fields = fields_of(raw, f"beginning of rank {rank}", PROOF_KEYS)
        layouts.add(fields.hexadecimal("layout", 64))
        if len(layouts) > 1:
            raise PlanDisagreementError(
                f"rank {rank} has another layout than rank 0: expected digests {sorted(layouts)} to be "
                "one; make it from the same config, mesh and checkpoint on every rank"
            )
        if fields["fingerprints"] is None:
            total = None
        elif total is not None:
            told = strict_json.members(fields["fingerprints"], f"beginning of rank {rank}")
            for value in told.values():
                total += Fingerprint.from_hex(str(value))
    return total
