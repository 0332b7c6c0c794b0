"""Chunks made in the caller's thread, consumed by a call in another.

obstore asks an iterator for its next item from inside its own event loop, where no other call of obstore may be
made. Making the next chunk may well make one: a publisher asks whether it still owns the store.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from syncline.abc import Buffer

_AHEAD = 2
_LOOK_S = 0.1


class _Stopped(Exception):  # noqa: N818 - nobody sees it
    """Tells the consumer that no whole object will come."""


def pumped(chunks: Iterable[Buffer], consume: Callable[[Iterator[bytes]], object]) -> None:
    """Let `consume` run beside this thread on copies of the chunks; return when it has returned.

    Raises:
        Whatever the chunks raise, once `consume` has ended; else whatever `consume` raises.
    Memory: two chunks, besides what `consume` keeps.

    Example:
        >>> kept = []
        >>> pumped([b"a", b"b"], kept.extend)
        >>> kept
        [b'a', b'b']
    """
    pipe: queue.Queue[bytes | _Stopped | None] = queue.Queue(_AHEAD)

    def feed() -> Iterator[bytes]:
        while (item := pipe.get()) is not None:
            if isinstance(item, _Stopped):
                raise item
            yield item

    with ThreadPoolExecutor(1, thread_name_prefix="syncline-put") as pool:
        consuming = pool.submit(consume, feed())

        def offer(item: bytes | _Stopped | None) -> bool:
            while not consuming.done():
                try:
                    pipe.put(item, timeout=_LOOK_S)
                except queue.Full:
                    continue
                return True
            return False

        try:
            for chunk in chunks:
                if not offer(bytes(chunk)):
                    break
        except BaseException:
            offer(_Stopped())
            raise
        offer(None)
        consuming.result()
