"""Who may read metrics over HTTP: TLS, a password, client certificates, and where no such thing is needed.

Invariants (tests/unit/test_exporter.py):
- beyond loopback the exporter serves only over TLS, and only those who know the password or have a
  certificate that the given authority signed, unless `security.insecure` says that all may be trusted;
- a password that others on the machine can read is not used.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from seer.common.endpoints import is_local
from seer.common.errors import ConfigError

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `seer exporter` about who may read; a `password_file` holds `USER:PASSWORD`."""

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    password_file: Path | None = None

    def check(self, host: str, insecure: bool) -> None:
        """Raise `ConfigError` if these options do not allow to serve at this address."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--tls-certificate and --tls-key belong together: give both, or none")
        if self.client_ca is not None and self.certificate is None:
            raise ConfigError("--tls-client-ca needs --tls-certificate and --tls-key")
        guarded = self.certificate is not None and (self.client_ca or self.password_file)
        if not (guarded or insecure or is_local(f"tcp://{host}:0")):
            raise ConfigError(
                f"--listen {host}: beyond loopback give --tls-certificate and --tls-key, and --password-file"
                " or --tls-client-ca, or set security.insecure = true in a network that all may trust"
            )

    def context(self) -> ssl.SSLContext | None:
        """Return the server's side of TLS; None: plain HTTP. Raises `ConfigError` for files of no use."""
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # SSLError is one
            raise ConfigError(
                f"--tls-certificate {self.certificate}: cannot be used with its key or authority: {error}"
            ) from error
        return context

    def guard(self, app: WsgiApp) -> WsgiApp:
        """Return `app` behind the password, if there is one. Raises `ConfigError` for a file of no use."""
        if self.password_file is None:
            return app
        secret = read_password(self.password_file)

        def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            if hmac.compare_digest(_given(environ.get("HTTP_AUTHORIZATION", "")), secret):
                return app(environ, start)
            headers = [("WWW-Authenticate", 'Basic realm="seer", charset="UTF-8"'), ("Content-Length", "0")]
            start("401 Unauthorized", headers)
            return [b""]

        return guarded


def _given(header: str) -> bytes:
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(credentials, validate=True)
    except (binascii.Error, ValueError):
        return b""


def read_password(path: Path) -> bytes:
    """Return `USER:PASSWORD` of a file. Raises `ConfigError` for a file without, or that others can read."""
    try:
        if path.stat().st_mode & 0o007:
            raise ConfigError(f"--password-file {path}: others can read it: chmod 600 {path}")
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--password-file {path}: cannot be read: {error.strerror}") from error
    user, colon, password = secret.partition(b":")
    if not (user and colon and password) or b"\n" in secret:
        raise ConfigError(f"--password-file {path}: must hold one line, USER:PASSWORD")
    return secret
