"""Peers: memory of other processes that is read without asking their programs.

Back ends are entries of one table, made when they are asked for; one that is missing says what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from syncline.abc import PeerMemory
from syncline.errors import ConfigError
from syncline.peers.memory import MemoryPeer
from syncline.peers.shared import SharedPeer
from syncline.peers.tcp import TcpPeer

__all__ = ["KINDS", "MemoryPeer", "SharedPeer", "TcpPeer", "open_peer"]


def _mooncake(bind: str) -> PeerMemory:
    from syncline.peers.mooncake import MooncakePeer  # noqa: PLC0415 - only where it is asked for

    return MooncakePeer(bind, accepts_open_ports=True)


def _nixl(bind: str) -> PeerMemory:
    from syncline.peers.nixl import NixlPeer  # noqa: PLC0415 - only where it is asked for

    return NixlPeer(bind)


KINDS: Mapping[str, Callable[[str], PeerMemory]] = MappingProxyType(
    {"tcp": TcpPeer, "mooncake": _mooncake, "nixl": _nixl}
)
"""What reaches other machines, by name."""


def open_peer(kind: str, bind: str = "127.0.0.1") -> PeerMemory:
    """Return memory that peers read over the transport of this name, with that transport's own defaults.

    Args:
        kind: one of `KINDS`. `mooncake` opens ports on all interfaces; naming it here accepts that.
        bind: the address under which peers reach this process.

    Raises:
        ConfigError: there is no such transport.
        TransportUnavailableError: it is not installed; says what to install.

    Example:
        >>> peer = open_peer("tcp")
        >>> peer.name
        'tcp'
        >>> peer.close()
    """
    if kind not in KINDS:
        raise ConfigError(f"peer transport: expected one of {', '.join(KINDS)}, found {kind!r}")
    return KINDS[kind](bind)
