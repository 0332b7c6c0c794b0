"""What releases of SGLang can do: one table, checked against the routes that a server has.

A server drops fields of a body that it does not know without a word, so nothing is found out by sending
one: the version and the list of routes decide.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from syncline import config
from syncline.errors import TransportUnavailableError

BEGIN = "/begin_weight_update"


@dataclass(frozen=True, slots=True)
class Rules:
    """How one range of releases wants to be updated.

    Attributes:
        first: the first release of the range.
        needs_session: tensors are taken between `begin` and `end` alone.
        has_checksums: `weights_checker` can tell checksums; before, nothing proves what a server holds.
        flushes_retracted: the cache can be flushed while retracted requests wait; before, only when no
            request is left at all.
    """

    first: tuple[int, int, int]
    needs_session: bool
    has_checksums: bool
    flushes_retracted: bool


TABLE = (
    Rules(first=(0, 5, 9), needs_session=False, has_checksums=False, flushes_retracted=False),
    Rules(first=(0, 5, 20), needs_session=False, has_checksums=True, flushes_retracted=False),
    Rules(first=(0, 5, 21), needs_session=True, has_checksums=True, flushes_retracted=True),
)
"""By first release, oldest first."""

KNOWN = ("0.5.9", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""Releases whose routes were read; the tests run the last one, and a double of each of the others."""

_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:$|[^\d.])")


def rules_of(version: str, routes: Collection[str]) -> Rules:
    """Return the rules of a server.

    Args:
        version: what the server says of itself.
        routes: the paths that it has.

    Raises:
        TransportUnavailableError: a release that Syncline was not made for, or whose routes are not those
            of its version; says which, and the setting that overrides the first.

    Example:
        >>> rules_of("0.5.23", ["/begin_weight_update"]).needs_session
        True
        >>> rules_of("0.5.20", []).needs_session
        False
    """
    found = _RELEASE.match(version)
    if version not in KNOWN and not config.is_untested_sglang_allowed():
        raise TransportUnavailableError(
            f"SGLang {version}: expected one of {', '.join(KNOWN)}; install one of them, or set "
            "SYNCLINE_SGLANG_UNTESTED=1 and compare checksums with a fresh start first"
        )
    if found is None:
        raise TransportUnavailableError(f"SGLang {version!r}: expected a release such as 0.5.23")
    release = tuple(int(number) for number in found.groups())
    fitting = [rules for rules in TABLE if rules.first <= release]
    if not fitting:
        raise TransportUnavailableError(f"SGLang {version} is older than {KNOWN[0]}")
    rules = fitting[-1]
    if rules.needs_session != (BEGIN in routes):
        raise TransportUnavailableError(
            f"SGLang {version}: expected {'a' if rules.needs_session else 'no'} route {BEGIN}, found "
            "otherwise; it is a patched build, or a proxy hides routes"
        )
    return rules
