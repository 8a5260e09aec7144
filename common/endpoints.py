"""Addresses of sockets, as settings and messages have them.

`tcp://host:port` or `ipc://path`; behind a `#`, 64 hexadecimal digits may say whose key answers there
(`net/keys.py`).
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from seer.common.errors import ConfigError


def shards(endpoint: str) -> list[str]:
    """Return the endpoints of `endpoints.dgds`, one per dgds process."""
    return [each.strip() for each in endpoint.split(",")]


def check_endpoint(field: str, endpoint: str, written: str = "tcp://host:port or ipc://path") -> None:
    """Raise `ConfigError` unless this is a valid address of a socket."""
    scheme, _, rest = endpoint.partition("://")
    address, mark, key = rest.partition("#") if scheme == "tcp" else (rest, "", "")
    host, _, port = address.rpartition(":")
    sound = bool(address)
    if scheme == "tcp":  # ZeroMQ would take a port modulo 2^16
        sound = bool(host) and port.isascii() and port.isdecimal() and int(port) < 2**16
    if scheme not in ("tcp", "ipc") or not sound:
        raise ConfigError(f"{field} = {endpoint!r}: write {written}, with a port below 65536")
    if mark and not re.fullmatch(r"[0-9a-f]{64}", key):
        raise ConfigError(f"{field} = {endpoint!r}: what follows # is no key of 64 hexadecimal digits")


def check_address(field: str, address: str) -> None:
    """Raise `ConfigError` unless this is `host:port`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{field} = {address!r}: write host:port, with a port from 1 to 65535")


def is_local(endpoint: str) -> bool:
    """Return whether only processes of this machine reach a TCP endpoint."""
    host = urlsplit(endpoint).hostname or ""
    return host == "localhost" or host.startswith("127.") or host == "::1"
