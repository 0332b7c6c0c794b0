"""A store whose writes may be seen late: what must be there is waited for, up to a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from syncline.abc import Store
from syncline.errors import ConfigError, ObjectNotFoundError
from syncline.format import names
from syncline.stores.passing import PassingStore
from syncline.stores.patience import Patience
from syncline.types import check_seconds


class LaggingStore(PassingStore):
    """Another store, with the patience that it needs.

    An object that is not there is looked for again until `within_s` has passed; `HEAD.json` alone is not,
    since a run that nobody has begun has none. Who lists a version's objects waits likewise for the
    ones that its manifest names (`visible_within_s`). Nothing is believed sooner for it: every object is
    still proved by its digest.

    Args:
        store: where the objects are.
        within_s: how long after it returned a write may be unseen.
        clock, sleep: the time; tests bring their own.

    Raises, besides what the store raises:
        ObjectNotFoundError: after `within_s`; says how long it waited.
    """

    def __init__(
        self,
        store: Store,
        within_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not check_seconds("within_s", within_s):
            raise ConfigError("within_s: expected more than 0 seconds")
        super().__init__(store)
        self.visible_within_s = within_s
        self._patience = Patience(within_s, clock=clock, sleep=sleep)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes of the object, which may have to be waited for; see `Store.get`."""
        if key == names.HEAD:
            return self._store.get(key, start, stop)
        return self._waiting(key, lambda: self._store.get(key, start, stop))

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the object in order, which may have to be waited for; see `Store.pieces`."""
        if size_bytes > 0:
            self._waiting(key, lambda: self._store.get(key, 0, 1))
        return self._store.pieces(key, size_bytes)

    def _waiting(self, key: str, attempt: Callable[[], bytes]) -> bytes:
        try:
            return self._patience.call(
                attempt, lambda error: isinstance(error, ObjectNotFoundError)
            )
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(
                f"{error}; it was waited for {self.visible_within_s} s"
            ) from error
