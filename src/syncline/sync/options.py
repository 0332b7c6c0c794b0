"""The settings of a publisher, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from syncline import codecs
from syncline.errors import ConfigError
from syncline.sync.notify import Deployments


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """How a publisher works; every field has a default that suits a model of any size.

    Attributes:
        encoding: of deltas: `auto` (the smallest, tensor by tensor) or a codec's name.
        full_encoding: of full versions: `full` (raw, a checkpoint that any loader opens) or `planes`
            (a third smaller).
        anchor_every: after so many deltas a full version with the same weights follows, so that an
            engine that joins late need not replay them all; engines that follow fetch nothing of it.
            None: never.
        part_bytes: weights that one part of a version stands for.
        memory_bytes: payload of one part that is held in memory; more goes to a temporary file.
        snapshot_dir: keep the copy of the last version's weights in memory-mapped files in this
            directory instead of in memory; None: in memory.
        notify: deployments to tell of every version that `publish` commits, over the hot-load API: URLs,
            alone or with commas between them, or a `HotLoadClient` for each.
        notify_token_env: environment variable that holds the bearer token for the URLs in `notify`.
        notify_timeout_s: how long all of them together may take.
    """

    encoding: str = "auto"
    full_encoding: str = "full"
    anchor_every: int | None = 100
    part_bytes: int = 4 << 30
    memory_bytes: int = 64 << 20
    snapshot_dir: str | PathLike[str] | None = None
    notify: Deployments = ()
    notify_token_env: str | None = None
    notify_timeout_s: float = 10.0

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
        for name in ("part_bytes", "memory_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if not self.notify_timeout_s > 0:
            raise ConfigError(f"notify_timeout_s must be above 0, found {self.notify_timeout_s}")
        if self.anchor_every is not None and self.anchor_every < 1:
            raise ConfigError(
                f"anchor_every: expected None or at least 1, found {self.anchor_every}"
            )
