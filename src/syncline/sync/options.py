"""The settings of a publisher, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from syncline import codecs
from syncline.errors import ConfigError


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
        device_copy: where weights are in GPU memory, keep a copy of the last version's there as well and
            compare on the GPU, so that only changes cross to the host. It takes as much GPU memory as
            the weights. False: all weights cross, and are compared on the host.
    """

    encoding: str = "auto"
    full_encoding: str = "full"
    anchor_every: int | None = 100
    part_bytes: int = 4 << 30
    memory_bytes: int = 64 << 20
    snapshot_dir: str | PathLike[str] | None = None
    device_copy: bool = True

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
        if self.anchor_every is not None and self.anchor_every < 1:
            raise ConfigError(
                f"anchor_every: expected None or at least 1, found {self.anchor_every}"
            )
