"""What a choice is made from: where everybody is, how fast the links are, how much changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from syncline.errors import ConfigError
from syncline.types import TensorMeta

Updater = Literal["shared-memory", "collective", "store", "peers"]

ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Topology:
    """Where trainer and engines are.

    Attributes:
        engines: how many take every version.
        hosts: machines that they are on; those on one share its link.
        writers: trainer processes that publish together.
        colocated: all engines run on the trainer's machine, as the same user.
        fabric: trainer and engines reach each other directly, as ranks of one job do.
        store: there is a store that the trainer may write into, and the engines read.
        joining: engines that join a fleet which runs already; no version is made for them.
        holders: engines or hosts that have the current version and offer it from memory.

    Raises:
        ConfigError: a count is out of range, or the fields contradict each other.
    """

    engines: int = 1
    hosts: int = 1
    writers: int = 1
    colocated: bool = False
    fabric: bool = False
    store: bool = True
    joining: int = 0
    holders: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"topology: {name} must be at least {least}, found {getattr(self, name)}"
                )
        if self.colocated and self.hosts > 1:
            raise ConfigError(
                f"topology: colocated engines are on one machine, found hosts={self.hosts}"
            )
        if self.hosts > self.engines:
            raise ConfigError(
                f"topology: {self.engines} engines cannot be on {self.hosts} hosts; hosts without "
                "an engine do not count"
            )


_LEAST = {"engines": 1, "hosts": 1, "writers": 1, "joining": 0, "holders": 0}


@dataclass(frozen=True, slots=True)
class Link:
    """How fast bytes go one way and the other.

    Attributes:
        up_bytes_per_s: from the trainer; `down_bytes_per_s`: to one machine with engines.
        latency_s: of one request or message and its answer.
        origin: where the figures are from: `assumed`, `given`, or what was measured.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float = 0.0
    origin: str = "given"

    def __post_init__(self) -> None:
        for name in ("up_bytes_per_s", "down_bytes_per_s"):
            speed = getattr(self, name)
            if not 0 < speed < math.inf:
                raise ConfigError(f"link: {name} must be above 0 and finite, found {speed}")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"link: latency_s must be from 0, found {self.latency_s}")

    @classmethod
    def of(cls, bytes_per_s: float, latency_s: float = 0.0, origin: str = "given") -> Link:
        """Return a link that is as fast in both directions."""
        return cls(bytes_per_s, bytes_per_s, latency_s, origin)


@dataclass(frozen=True, slots=True)
class Links:
    """The links that versions may go over; what nobody measured is assumed to be of ordinary speed."""

    store: Link = field(default_factory=lambda: Link.of(200e6, 0.01, ASSUMED))
    fabric: Link = field(default_factory=lambda: Link.of(1.25e9, 0.0002, ASSUMED))


@dataclass(frozen=True, slots=True)
class Density:
    """How much a model changes from one version to the next.

    Attributes:
        model_bytes: of the weights written out raw.
        share: of the units that change, 0 to 1.
        dtype: of most weights.
        origin: where the figures are from, as in `Link`.
    """

    model_bytes: int
    share: float
    dtype: str = "BF16"
    origin: str = "given"

    def __post_init__(self) -> None:
        if self.model_bytes < 1:
            raise ConfigError(f"density: model_bytes must be at least 1, found {self.model_bytes}")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"density: share must be from 0 to 1, found {self.share}")
        TensorMeta("model", self.dtype, ())

    @property
    def meta(self) -> TensorMeta:
        """All weights as one tensor, which is what sizes are foretold of."""
        units = max(1, self.model_bytes // TensorMeta("model", self.dtype, ()).unit_bytes)
        return TensorMeta("model", self.dtype, (units,))

    @property
    def changed(self) -> int:
        """Units that change."""
        return round(self.share * self.meta.unit_count)
