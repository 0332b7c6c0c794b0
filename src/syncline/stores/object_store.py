"""A store in anything that obstore opens: S3 and what speaks it, Google Cloud Storage, Azure, its memory store.

Objects up to 128 MiB are put in one request with the condition that the key is free. Larger ones go up in
pieces under a hidden key and are then copied by the service, on the same condition, so that no more than a
few pieces are in memory. Compare-and-swap is a put on condition of the entity tag that was read. A service that
speaks S3 but has no conditions is found out before the first write, and a lease stands in for them.
"""

from __future__ import annotations

from typing import Any, Literal

import obstore.store

from syncline.errors import ConfigError
from syncline.stores.patience import Patience
from syncline.stores.remote import RemoteStore
from syncline.stores.service import Service
from syncline.stores.writes import Conditional, Leased, Writes, honours_conditions, lease_on

WriteKind = Literal["auto", "conditional", "lease"]

DEADLINE_S = 120.0
"""How long one request is tried again by default."""


class ObjectStore(RemoteStore):
    """A store in an object store; keys are below the prefix that the obstore store was made with.

    Args:
        store: made by `obstore.store.from_url` or one of its classes. On S3 it must be configured with
            `copy_if_not_exists="multipart"`, as `open_store` does, for objects above `one_request_bytes`.
        name: what messages call it; no secret may be in it.
        one_request_bytes: the largest object that is put in one request, from memory; above 32 MiB only where
            the last puts were so fast that it takes some ten seconds at most. A copy costs the service more.
        deadline_s: how long a request that fails in passing (cut connection, status 5xx or 429) is tried
            again, with growing pauses.
        writes: `conditional`: by the service's own conditions; `lease`: for services without
            any, see `syncline.stores.lease` for what it guarantees; `auto`: find out before the first write
            where the service only says that it speaks S3 (about ten small requests), else `conditional`.

    Raises, besides what `Store` says:
        TransportUnavailableError: the service lacks a conditional operation; nothing was changed.

    A writer that is killed during a large put may leave pieces and a hidden `.syncline-*` object behind,
    which no reader sees; a lifecycle rule of the bucket is the place to expire both. Safe to use from many
    threads. On S3 an object that is larger than 5 GiB cannot be copied, so cannot be put.
    """

    def __init__(
        self,
        store: Any,
        *,
        name: str | None = None,
        one_request_bytes: int = 128 << 20,
        deadline_s: float = DEADLINE_S,
        writes: WriteKind = "auto",
    ) -> None:
        if writes not in ("auto", "conditional", "lease"):
            raise ConfigError(
                f"writes: expected 'auto', 'conditional' or 'lease', found {writes!r}"
            )
        service = Service(store, Patience(deadline_s))

        def decide() -> Writes:
            is_known = writes != "auto" or not isinstance(store, obstore.store.S3Store)
            has_conditions = writes != "lease" and (is_known or honours_conditions(service))
            return Conditional(service) if has_conditions else Leased(service, lease_on(service))

        super().__init__(
            service,
            name=repr(store) if name is None else name,
            one_request_bytes=one_request_bytes,
            decide=decide,
        )
