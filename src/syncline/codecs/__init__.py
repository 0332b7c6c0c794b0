"""Codecs: bytes to bytes for one tensor, found here by the name that the manifest uses.

Each module implements `syncline.abc.Codec` for one encoding of `docs/reference/format.md`,
section 6. Whatever a payload says is checked before it is believed; what comes out is always
overwrite form.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from syncline.abc import Codec
from syncline.codecs.full import Full
from syncline.codecs.indices import Indices
from syncline.codecs.overwrite import Overwrite
from syncline.codecs.packed import Packed
from syncline.codecs.planes import Planes
from syncline.codecs.tight import Tight
from syncline.codecs.xor import Xor
from syncline.errors import ConfigError

CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.name: codec
        for codec in (Full(), Indices(), Overwrite(), Packed(), Planes(), Tight(), Xor())
    }
)
"""Every codec by name; all are stateless, so one instance serves all threads."""

NAMES = tuple(CODECS)


def get(name: str) -> Codec:
    """Return the codec of this name.

    Raises:
        ConfigError: there is none.

    Example:
        >>> get("xor").is_idempotent
        False
    """
    if name not in CODECS:
        raise ConfigError(f"encoding must be one of {NAMES}, found {name!r}")
    return CODECS[name]
