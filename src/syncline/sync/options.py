"""The settings of a publisher, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from os import PathLike
from typing import Any, Literal

from syncline import codecs
from syncline.errors import CodecError, ConfigError
from syncline.format import checksum as checksums
from syncline.format.bucket import check_bucket_bytes
from syncline.format.index import CHECKSUM
from syncline.format.rules import INTERCHANGE_ENCODINGS
from syncline.sync.notify import Deployments
from syncline.types import TensorMeta, check_seconds
from syncline.version import Kind

_OVERWRITE_LIMIT_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """How a publisher works; every field has a default that suits a model of any size.

    Attributes:
        encoding: of deltas: `auto` or a codec's name. `auto` takes, tensor by tensor, the smallest; or with
            `link_bytes_per_s` what is over soonest.
        link_bytes_per_s: how fast one engine gets bytes from the trainer; coding is counted at the speed
            of one core.
        full_encoding: of full versions: `full` (raw, a checkpoint that any loader opens) or `planes`
            (a third smaller).
        anchor_every: after so many deltas a full version with the same weights follows, so that an
            engine that joins late need not replay them all; engines that follow fetch nothing of it.
            None: never.
        part_bytes: most weights that one part of a version stands for; deltas in stores behind a network
            have smaller ones, see `docs/reference/stores.md`.
        memory_bytes: payload of one part that is held in memory; more goes to a temporary file.
        snapshot_dir: keep the copy of the last version's weights in memory-mapped files in this
            directory instead of in memory; None: in memory.
        device_copy: where weights are in GPU memory, keep a copy of the last version's there as well and
            compare on the GPU, so that only changes cross to the host. It takes as much GPU memory as
            the weights. False: all weights cross, and are compared on the host.
        layout: `syncline`, or `slime`: every version is also one that readers of the slime family take.
            Then deltas are `xor` (which `auto` means) or `overwrite`, and full versions `full`.
        checksum: of a tensor's new bytes, for those readers: `xxh3-128`, `blake3` or `adler32`.
        notify: deployments to tell of every version that `publish` commits, over the hot-load API: URLs,
            alone or with commas between them, or a `HotLoadClient` for each.
        notify_token_env: environment variable that holds the bearer token for the URLs in `notify`.
        notify_timeout_s: how long all of them together may take.
        live_kind: of a publisher with a live path: `auto` sends an engine the delta if it holds the base,
            else all weights; `full` or `delta`: that alone.
        bucket_bytes: longest piece in which a version travels on it; two of them are held on either side.
            None: what suits the transport.
        live_timeout_s: the longest that the trainer waits there for an engine to answer, to release a
            bucket, or to decode and commit what came.
        live_address: where engines join a live path that was chosen: a path for shared memory, `host:port`
            for a collective. None: of this machine alone.
    """

    encoding: str = "auto"
    link_bytes_per_s: float | None = None
    full_encoding: str = "full"
    anchor_every: int | None = 100
    part_bytes: int = 4 << 30
    memory_bytes: int = 64 << 20
    snapshot_dir: str | PathLike[str] | None = None
    device_copy: bool = False
    layout: Literal["syncline", "slime"] = "syncline"
    checksum: str = CHECKSUM
    notify: Deployments = ()
    notify_token_env: str | None = None
    notify_timeout_s: float = 10.0
    live_kind: Literal["auto", "full", "delta"] = "auto"
    bucket_bytes: int | None = None
    live_timeout_s: float = 60.0
    live_address: str | None = None

    def __post_init__(self) -> None:
        if self.encoding != "auto" and self.encoding not in codecs.NAMES:
            raise ConfigError(
                f"encoding: expected 'auto' or one of {', '.join(codecs.NAMES)}, "
                f"found {self.encoding!r}"
            )
        if not codecs.get(self.full_encoding).is_full:
            raise ConfigError(
                f"full_encoding: expected 'full' or 'planes', found {self.full_encoding!r}"
            )
        if self.link_bytes_per_s is not None and not 0 < self.link_bytes_per_s < math.inf:
            raise ConfigError(
                "link_bytes_per_s: expected a positive number of bytes a second, found "
                f"{self.link_bytes_per_s}"
            )
        self._check_layout()
        for name in ("part_bytes", "memory_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if not check_seconds("notify_timeout_s", self.notify_timeout_s):
            raise ConfigError("notify_timeout_s must be above 0")
        self._check_live()
        if self.anchor_every is not None and self.anchor_every < 1:
            raise ConfigError(
                f"anchor_every: expected None or at least 1, found {self.anchor_every}"
            )

    def check(self, metas: Iterable[TensorMeta]) -> None:
        """Check that deltas of these tensors can be written, before the first one is due.

        Raises:
            CodecError: `overwrite` has positions of 32 bits, and a tensor has more bytes than they reach.
        """
        if self.encoding != "overwrite":
            return
        for meta in metas:
            if meta.nbytes >= _OVERWRITE_LIMIT_BYTES:
                raise CodecError(
                    f"tensor {meta.name!r} has {meta.nbytes} bytes; positions of encoding 'overwrite' have "
                    f"32 bits and would wrap at {_OVERWRITE_LIMIT_BYTES}; publish with encoding='xor'",
                    tensor=meta.name,
                )

    def chosen(self, kind: Kind, link_bytes_per_s: float) -> PublisherOptions:
        """Return the options with what was chosen, where they do not say otherwise."""
        changes: dict[str, Any] = {}
        if self.link_bytes_per_s is None and self.encoding == "auto":
            changes["link_bytes_per_s"] = link_bytes_per_s
        if self.live_kind == "auto" and kind == "full":
            changes["live_kind"] = kind
        return replace(self, **changes)

    def _check_live(self) -> None:
        if self.live_kind not in ("auto", "full", "delta"):
            raise ConfigError(
                f"live_kind: expected 'auto', 'full' or 'delta', found {self.live_kind!r}"
            )
        if self.bucket_bytes is not None:
            check_bucket_bytes(self.bucket_bytes)
        if not check_seconds("live_timeout_s", self.live_timeout_s):
            raise ConfigError("live_timeout_s must be above 0")

    def _check_layout(self) -> None:
        if self.layout not in ("syncline", "slime"):
            raise ConfigError(f"layout: expected 'syncline' or 'slime', found {self.layout!r}")
        checksums.new(self.checksum)
        if self.layout == "syncline":
            if self.checksum != CHECKSUM and self.encoding not in INTERCHANGE_ENCODINGS:
                raise ConfigError(
                    f"checksum: {self.checksum!r} is written with encoding 'xor' or 'overwrite' alone, "
                    f"found encoding {self.encoding!r}; pass layout='slime'"
                )
            return
        if self.encoding == "auto":
            object.__setattr__(self, "encoding", "xor")
        if self.encoding not in INTERCHANGE_ENCODINGS or self.full_encoding != "full":
            raise ConfigError(
                "layout 'slime': expected encoding 'xor' or 'overwrite' and full_encoding 'full', found "
                f"{self.encoding!r} and {self.full_encoding!r}; its readers take no others"
            )


def named(options: Mapping[str, Any]) -> PublisherOptions:
    """Return options by the names of their fields.

    Raises:
        ConfigError: there is no such field; names the nearest one. Or see `PublisherOptions`.

    Example:
        >>> named({"encodng": "xor"})
        Traceback (most recent call last):
        syncline.errors.ConfigError: a publisher has no option 'encodng'; did you mean 'encoding'?
    """
    known = [field.name for field in fields(PublisherOptions)]
    for name in options:
        if name not in known:
            nearest = get_close_matches(name, known, 1)
            meant = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known)}"
            raise ConfigError(f"a publisher has no option {name!r}; {meant}")
    return PublisherOptions(**options)
