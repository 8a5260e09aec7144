"""The sockets that a gateway listens on.

Invariants:
- a client that vanished, or reads nothing, is disconnected after `gateway.client_seconds`, by the kernel;
- an address that something else listens on is refused, by the name of its setting.
"""

from __future__ import annotations

import socket

from seer.common.config import Config, GatewayConfig
from seer.common.endpoints import is_local
from seer.common.errors import ConfigError

NAMES = ("data", "control")
"""The settings of the addresses."""


def listen_on_both(config: Config, *, shared: bool = False) -> dict[str, socket.socket]:
    """Bind both addresses; see `listen`.

    Raises `ConfigError` for an address that other machines reach, if there are no keys and
    `security.insecure` is off.
    """
    settings, bound = config.gateway, dict[str, socket.socket]()
    if bool(settings.tls_certificate) != bool(settings.tls_key):
        raise ConfigError("gateway.tls_certificate and gateway.tls_key: give both, or neither")
    for name in NAMES:
        address = getattr(settings, name)
        if not (config.security.peers or config.security.insecure or is_local(f"tcp://{address}")):
            raise ConfigError(
                f"gateway.{name} = {address!r} would be open to everyone who reaches it: give security.key"
                " and security.peers (`seer keys init`), or set security.insecure = true in a network that"
                " all may trust"
            )
        bound[name] = listen(f"gateway.{name}", address, settings.client_seconds, shared=shared)
    return bound


def listen(setting: str, address: str, client_seconds: float, *, shared: bool = False) -> socket.socket:
    """Bind `host:port`; if `shared`, other processes of this user may bind it, too.

    Raises `ConfigError` that names the setting.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Connections inherit these. The kernel ends one whose peer answers, or reads, nothing for as long.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        seconds = max(1, round(client_seconds))
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 3))
    try:
        bound.bind((host, int(port)))
    except OSError as error:
        bound.close()
        raise ConfigError(f"{setting} = {address!r}: cannot be bound: {error.strerror or error}") from error
    return bound


def url_of(bound: socket.socket, settings: GatewayConfig) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    scheme = "https" if settings.tls_certificate else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
