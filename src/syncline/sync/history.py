"""The chain of versions in a store: read from `HEAD.json` backwards, each manifest checked by its digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType

from syncline.abc import Store
from syncline.errors import (
    BaseVersionError,
    FormatError,
    ObjectNotFoundError,
    StoreError,
    TransportError,
    VerifyError,
)
from syncline.format import digest, names
from syncline.format import head as head_format
from syncline.format import manifest as manifest_format
from syncline.format.table import MAX_INLINE_TENSORS
from syncline.threads import Background
from syncline.types import Fingerprint
from syncline.version import Head, HeldVersion, Manifest, PartEntry

_NONE: Mapping[str, bytes] = MappingProxyType({})


class History:
    """The versions that the current `HEAD.json` reaches; one instance sees one moment of the store.

    Raises:
        StoreError: the store is empty: nobody has published into it yet.
        FormatError, VerifyError: HEAD or a manifest is damaged; the message names it.
    """

    def __init__(self, store: Store, head: Head, early: Mapping[str, bytes] = _NONE) -> None:
        self.store = store
        self.head = head
        self._early = early
        self._manifests: dict[str, HeldVersion] = {}

    @classmethod
    def open(cls, store: Store, held: HeldVersion | None = None) -> History:
        """Read `HEAD.json` and return the history that it names.

        Args:
            held: version from which somebody goes on; its manifest is not read again. A remote store is asked for
                manifest and table of the next one together with HEAD, which saves round trips whenever there is one.
        """
        early: dict[str, bytes] = {}
        with Background(2) as beside:
            # A store that lags would wait for a manifest that may never come.
            if held is not None and store.is_remote and store.visible_within_s == 0:
                for name in _described_by(held.manifest):
                    key = names.key(held.version + 1, name)
                    beside.run(partial(_read_early, store, key, early))
            raw = read_head(store)
        if raw is None:
            raise StoreError(
                f"no {names.HEAD} in {store}: expected a run that a publisher has begun; "
                "publish into it first, or check the path"
            )
        history = cls(store, head_format.load(raw), early)
        if held is not None and held.manifest.run_id == history.head.run_id:
            history._manifests[held.sha256] = held
        return history

    @property
    def current(self) -> HeldVersion | None:
        """The version that HEAD names; None before the first commit."""
        if self.head.version is None or self.head.manifest_sha256 is None:
            return None
        return self.load(self.head.version, self.head.manifest_sha256)

    def load(self, version: int, sha256: str) -> HeldVersion:
        """Return the version with this number and manifest digest.

        Raises:
            VerifyError: the manifest, or its tensor table, is not the one that the digest names.
            FormatError: it is, but it contradicts the history that named it.
        """
        if sha256 not in self._manifests:
            key = names.key(version, names.MANIFEST)
            raw = self._early.get(key, b"")
            if digest.sha256(raw) != sha256:
                raw = self.store.get(key)
            _check_digest(raw, sha256, key, version)
            wanted = manifest_format.wanted_sidecar(raw, key)
            table = None if wanted is None else self._sidecar(version, wanted)
            manifest = manifest_format.load(raw, table, key)
            if (manifest.version, manifest.run_id) != (version, self.head.run_id):
                raise FormatError(
                    f"{key}: expected version {version} of run {self.head.run_id}, found version "
                    f"{manifest.version} of run {manifest.run_id}; the store mixes two runs",
                    version=version,
                )
            self._manifests[sha256] = HeldVersion(manifest, sha256)
        return self._manifests[sha256]

    def back(self, start: HeldVersion | None = None) -> Iterator[HeldVersion]:
        """Yield `start` (the current version by default), then its base, and so on to the first left."""
        at = self.current if start is None else start
        can_end = False
        while at is not None:
            yield at
            epoch = at.manifest.epoch
            can_end = can_end or at.manifest.kind == "full"
            base, sha256 = at.manifest.base_version, at.manifest.base_sha256
            try:
                at = None if base is None or sha256 is None else self.load(base, sha256)
            except ObjectNotFoundError:
                if not can_end:
                    raise
                return  # the far end was removed, which may be done up to a full version
            if at is not None and at.manifest.epoch > epoch:
                raise FormatError(
                    f"version {at.version} is of epoch {at.manifest.epoch}, the version made on it of "
                    f"epoch {epoch}: epochs only rise; run syncline fsck",
                    version=at.version,
                )

    def find(self, version: int) -> HeldVersion:
        """Return the version with this number.

        Raises:
            BaseVersionError: the run has no such version.
        """
        for at in self.back():
            if at.version == version:
                return at
            if at.version < version:
                break
        raise BaseVersionError(
            f"version {version} is not in this run, or was removed: its current version is "
            f"{self.head.version}; syncline log lists those that are there",
            version=version,
        )

    def target(self, version: int | None) -> HeldVersion:
        """Return the version with this number, or the current one.

        Raises:
            BaseVersionError: the run has no such version, or none at all yet.
        """
        target = self.current if version is None else self.find(version)
        if target is None:
            raise BaseVersionError("the run has no version yet: publish one first")
        return target

    def with_fingerprint(self, fingerprint: Fingerprint) -> HeldVersion | None:
        """Return the newest version whose weights have this model fingerprint, if there is one."""
        return next((at for at in self.back() if at.manifest.fingerprint == fingerprint), None)

    def deltas_since_full(self) -> int:
        """Return how many deltas lie between the current version and the newest full one."""
        return next((i for i, at in enumerate(self.back()) if at.manifest.kind == "full"), 0)

    def path(self, held: HeldVersion | None, target: HeldVersion) -> list[HeldVersion]:
        """Return the versions to apply in turn, from `held` to `target`, cheapest in bytes.

        The list is empty if nothing is to be done. It begins either with a delta on `held` or with a
        full version; a version with the same weights as its base costs nothing after that base.
        """
        if held is not None and held.sha256 == target.sha256:
            return []
        best: list[HeldVersion] | None = None
        best_bytes = 0
        behind: list[HeldVersion] = []
        behind_bytes = 0
        for at in self.back(target):
            manifest = at.manifest
            if held is not None and at.sha256 == held.sha256:
                if best is None or behind_bytes < best_bytes:
                    best = list(behind)
                break
            if manifest.kind == "full":
                full_bytes = manifest.payload_bytes + behind_bytes
                if best is None or full_bytes < best_bytes:
                    best, best_bytes = [at, *behind], full_bytes
            behind.insert(0, at)
            behind_bytes += step_bytes(at)
            can_improve = best is None or behind_bytes < best_bytes
            if not can_improve or (held is None and best is not None):
                break
            if manifest.kind == "full" and manifest.fingerprint != manifest.fingerprint_before:
                break
        if best is None:
            raise FormatError(
                f"version {target.version} cannot be rebuilt: no full version lies on its chain",
                version=target.version,
            )
        return best

    def _sidecar(self, version: int, wanted: PartEntry) -> bytes:
        key = names.key(version, wanted.path)
        raw = self._early.get(key, b"")
        if digest.sha256(raw) == wanted.sha256:
            return raw
        return self.store.get(key, 0, wanted.size_bytes + 1)


def _described_by(manifest: Manifest) -> tuple[str, ...]:
    """Return the objects that say what is in a version; the next one has as many tensors."""
    if len(manifest.tensors) <= MAX_INLINE_TENSORS:
        return (names.MANIFEST,)
    return names.MANIFEST, names.SIDECAR


def _read_early(store: Store, key: str, early: dict[str, bytes]) -> None:
    """Read an object that may not be there; whoever needs it asks again, and meets the error then."""
    with suppress(TransportError):
        early[key] = store.get(key)


def read_head(store: Store) -> bytes | None:
    """Return the raw bytes of `HEAD.json`, or None if the store has none."""
    try:
        return store.get(names.HEAD)
    except ObjectNotFoundError:
        return None


def is_same_weights(at: HeldVersion) -> bool:
    """Tell whether a version has the very weights of its base, so that no payload is needed."""
    return at.manifest.fingerprint == at.manifest.fingerprint_before


def step_bytes(at: HeldVersion) -> int:
    """Return the bytes that a holder of the base fetches to get to this version."""
    return 0 if is_same_weights(at) else at.manifest.payload_bytes


def _check_digest(raw: bytes, sha256: str, key: str, version: int) -> None:
    found = digest.sha256(raw)
    if found != sha256:
        raise VerifyError(
            f"{key}: expected sha256 {sha256}, found {found}; the object is damaged or was replaced",
            version=version,
        )
