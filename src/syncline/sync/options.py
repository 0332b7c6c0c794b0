"""The settings of a publisher, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike

from syncline import codecs
from syncline.errors import ConfigError


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
        part_bytes: weights that one part of a version stands for.
        memory_bytes: payload of one part that is held in memory; more goes to a temporary file.
        snapshot_dir: keep the copy of the last version's weights in memory-mapped files in this
            directory instead of in memory; None: in memory.
    """

    encoding: str = "auto"
    link_bytes_per_s: float | None = None
    full_encoding: str = "full"
    anchor_every: int | None = 100
    part_bytes: int = 4 << 30
    memory_bytes: int = 64 << 20
    snapshot_dir: str | PathLike[str] | None = None

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
        for name in ("part_bytes", "memory_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.anchor_every is not None and self.anchor_every < 1:
            raise ConfigError(
                f"anchor_every: expected None or at least 1, found {self.anchor_every}"
            )
