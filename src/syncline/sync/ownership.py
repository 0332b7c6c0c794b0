"""Who may write into a store: one publisher at a time, by compare-and-swap on `HEAD.json`."""

from __future__ import annotations

import secrets
from dataclasses import replace

from syncline.abc import Observe, Store
from syncline.errors import ForeignDirectoryError, VersionConflictError
from syncline.format import head as head_format
from syncline.format import names
from syncline.sync.history import History, read_head
from syncline.types import Step
from syncline.version import Head, HeldVersion

STEPS = ("publish.taken_over", "publish.leftovers_removed", "publish.head_swapped")


class Ownership:
    """The right to commit into a store, until a later publisher takes it.

    Making one takes the store over: the next epoch is swapped in, so that every later swap of an older
    publisher fails. In an empty store it begins a run.

    Raises:
        VersionConflictError: two new publishers did so at the same moment, and this one lost.
        ForeignDirectoryError: the store has no `HEAD.json`, but other objects: they are somebody else's.
        FormatError: `HEAD.json` is damaged.
    """

    def __init__(self, store: Store, observe: Observe) -> None:
        self._store = store
        self._observe = observe
        self.head = self._taken_over(read_head(store))
        observe(Step("publish.taken_over"))

    @property
    def next_version(self) -> int:
        """Number that the next version gets."""
        return 1 if self.head.version is None else self.head.version + 1

    def history(self) -> History:
        """Return the versions that the owned HEAD reaches."""
        return History(self._store, self.head)

    def _taken_over(self, raw: bytes | None) -> Head:
        """Swap the next epoch in; an older publisher that commits meanwhile is taken over all the same."""
        if raw is None:
            _check_empty(self._store)
            head = Head(secrets.token_hex(16), 1, None, None)
            self._swap(None, head)
            return head
        old = head_format.load(raw)
        head = replace(old, epoch=old.epoch + 1)
        try:
            self._swap(raw, head)
        except VersionConflictError:
            found = read_head(self._store)
            if found is None or not _is_later(head_format.load(found), old):
                raise
            return self._taken_over(found)
        return head

    def check(self) -> None:
        """Read HEAD again: it is this publisher's, perhaps moved by a swap whose answer got lost.

        Raises:
            VersionConflictError: it is another publisher's.
        """
        self.head = check_owned(self._store, self.head.run_id, self.head.epoch)

    def commit(self, version: HeldVersion) -> None:
        """Make a version, all of whose objects are in the store, the current one."""
        head = replace(self.head, version=version.version, manifest_sha256=version.sha256)
        self._swap(head_format.dump(self.head), head)
        self.head = head
        self._observe(Step("publish.head_swapped"))

    def _swap(self, expected: bytes | None, head: Head) -> None:
        try:
            self._store.compare_and_swap(names.HEAD, expected, head_format.dump(head))
        except VersionConflictError as error:
            raise VersionConflictError(
                "another publisher took the store over, or committed, at the same moment; nothing was "
                "changed; let one publisher write into a store, then publish again"
            ) from error

    def remove_leftovers(self) -> None:
        """Remove objects of versions that were begun but never committed.

        Raises:
            VersionConflictError: another publisher has taken the store over.
        """
        current = 0 if self.head.version is None else self.head.version
        for info in self._store.list(names.VERSION_PREFIX):
            version = names.version_of(info.key.split("/")[0])
            if version is not None and version > current:
                self.check()  # a later publisher may be writing the same version by now
                self._store.delete(info.key)
        self._observe(Step("publish.leftovers_removed"))


def _is_later(found: Head, old: Head) -> bool:
    """Tell whether the same publisher has committed another version, so that nobody took the store over."""
    is_same = (found.run_id, found.epoch) == (old.run_id, old.epoch)
    return is_same and found.version != old.version


def check_owned(store: Store, run_id: str, epoch: int) -> Head:
    """Return the store's HEAD, which is of this run and epoch.

    Raises:
        VersionConflictError: it is another publisher's.
    """
    raw = read_head(store)
    found = None if raw is None else head_format.load(raw)
    if found is None or (found.run_id, found.epoch) != (run_id, epoch):
        other = "no HEAD" if found is None else f"epoch {found.epoch} of run {found.run_id}"
        raise VersionConflictError(
            f"another publisher has taken the store over, {store}: expected epoch {epoch} of run {run_id}, found "
            f"{other}; stop this publisher, or make a new one to take the store back"
        )
    return found


def _check_empty(store: Store) -> None:
    """Check that a run may begin here: its first publisher removes what lies where versions go."""
    found = store.list()
    if found and not any(info.key == names.HEAD for info in found):
        raise ForeignDirectoryError(
            f"{store} holds {found[0].key!r} but no {names.HEAD}: expected an empty store, or one that "
            "Syncline made; nothing was touched; choose another place"
        )
