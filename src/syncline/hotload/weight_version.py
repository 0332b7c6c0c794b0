"""Which weights a request will take: the field `weight_version`, and the answer where it cannot be met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from syncline.errors import FormatError
from syncline.format import strict_json
from syncline.hotload import identity

FIELD = "weight_version"
EXACT = "exact_version"
MINIMUM = "min_required_version"
MINIMUM_TOO = "min_version"
"""What Stitch's code calls `min_required_version`."""

REFUSED_STATUS = 409


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not served now: HTTP 409.

    Attributes:
        kind: `WeightVersionNotReady`: ask again later; `WeightVersionTooOld`: it will not come back.
        wanted: the version that was asked for.
        served: the version that is served; None for none.
    """

    kind: Literal["WeightVersionNotReady", "WeightVersionTooOld"]
    wanted: int
    served: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the answer's body."""
        if self.served is None:
            found = "no version is served yet"
        else:
            found = f"version {self.served} is served"
        return {
            "error": {
                "type": self.kind,
                "message": f"version {self.wanted} was asked for, {found}",
                "target_version": self.wanted,
                "current_version": self.served,
            }
        }


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The versions that a request accepts; both bounds hold where both are given.

    Example:
        >>> WeightVersion.parse({"min_required_version": 7}).refusal(6).kind
        'WeightVersionNotReady'
        >>> WeightVersion.parse({"exact_version": "weight_v000005"}).refusal(6).kind
        'WeightVersionTooOld'
        >>> WeightVersion.parse({"exact_version": 6}).refusal(6) is None
        True
    """

    exact: int | None = None
    minimum: int | None = None

    @classmethod
    def parse(cls, value: object, where: str = FIELD) -> WeightVersion:
        """Read the field; versions are integers, or strings that name a version.

        Raises:
            FormatError: not an object, an unknown key, not a version, or two different minima.
        """
        members = strict_json.members(value, where)
        for key in members:
            if key not in (EXACT, MINIMUM, MINIMUM_TOO):
                raise FormatError(
                    f"{where}.{key:.80} is not a known key; known are {EXACT}, {MINIMUM} and "
                    f"{MINIMUM_TOO}"
                )
        exact, minimum, minimum_too = (
            _version(members, key, where) for key in (EXACT, MINIMUM, MINIMUM_TOO)
        )
        if minimum is None:
            minimum = minimum_too
        elif minimum_too not in (None, minimum):
            raise FormatError(
                f"{where}: {MINIMUM} {minimum} and {MINIMUM_TOO} {minimum_too} contradict each other"
            )
        return cls(exact, minimum)

    @property
    def is_any(self) -> bool:
        """True if every version will do, and none at all as well."""
        return self.exact is None and self.minimum is None

    @property
    def lowest(self) -> int:
        """Number of the lowest version that could be accepted."""
        return max((v for v in (self.exact, self.minimum) if v is not None), default=0)

    def accepts(self, version: int) -> bool:
        """Tell whether the request may be served with this version."""
        return self.refusal(version) is None

    def refusal(self, served: int | None) -> Refusal | None:
        """Return why the request cannot be served while `served` is; None if it can."""
        wanted = [version for version in (self.exact, self.minimum) if version is not None]
        for version in wanted:
            if served is None or served < version:
                return Refusal("WeightVersionNotReady", version, served)
        if self.exact is not None and served is not None and served > self.exact:
            return Refusal("WeightVersionTooOld", self.exact, served)
        return None


def _version(members: Mapping[str, Any], key: str, where: str) -> int | None:
    value = members.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        return identity.parse(value, f"{where}.{key}")[0]
    return strict_json.integer(value, f"{where}.{key}", minimum=0)
