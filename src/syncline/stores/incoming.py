"""The caller's chunks on their way into a store, so that the caller's errors are not taken for the store's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from syncline.abc import Buffer


class Incoming:
    """Passes chunks on and remembers the error that came out of them, if one did."""

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        self._chunks = chunks
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[Buffer]:
        try:
            yield from self._chunks
        except BaseException as error:
            self.error = error
            raise
