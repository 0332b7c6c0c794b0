"""Which network interface has an address."""

from __future__ import annotations

import ipaddress
import socket
import struct
from importlib import import_module

from syncline.errors import ConfigError

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str:
    """Return the name of the interface with this IPv4 address. Linux alone.

    Raises:
        ConfigError: none has it.

    Example:
        >>> interface_of("127.0.0.1")
        'lo'
    """
    wanted = ipaddress.ip_address(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            if _address(sock, name) == wanted:
                return name
    raise ConfigError(f"bind: no interface of this machine has the address {address}")


def _address(sock: socket.socket, interface: str) -> ipaddress.IPv4Address | None:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        answer = import_module("fcntl").ioctl(sock.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None  # it has none
    return ipaddress.IPv4Address(answer[20:24])
