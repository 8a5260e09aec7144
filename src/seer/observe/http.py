"""A small HTTP server for metrics, on threads: scrapes are few, and their text is made without an event loop.

Invariants (tests/unit/test_exporter.py):
- at most `MOST_AT_ONCE` connections; further ones are closed at once;
- nobody holds a connection longer than `CONNECTION_SECONDS`, whatever is sent, or not sent, over it; a
  handshake delays no other connection.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from socketserver import TCPServer, ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from seer.common.errors import ConfigError
from seer.observe.access import WsgiApp

MOST_AT_ONCE = 16
CONNECTION_SECONDS = 15.0
"""More than a scrape may take; Prometheus gives up after 10 s."""


class _Handler(WSGIRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Log nothing: a scraper asks every few seconds."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves `app` at `host:port` on a thread of its own, from `start` to `stop`. Raises `ConfigError`."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, host: str, port: int, app: WsgiApp, context: ssl.SSLContext | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._context = context
        self._slots = BoundedSemaphore(MOST_AT_ONCE)
        self._since: dict[socket.socket, float] = {}
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(
                f"--listen {host}:{port}: {why}; give a free address of this machine"
            ) from error
        self.set_app(app)
        self._thread = Thread(target=self.serve_forever, name="metrics", daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Serve no longer; connections end by themselves."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    # --- what socketserver calls -----------------------------------------------------------

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the base class
        """Handle a connection on a thread, if there is room."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            del self._since[request]
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Shake hands, and answer."""
        served = request
        try:
            with contextlib.suppress(OSError):  # the other end has gone, or is no friend of TLS
                request.settimeout(CONNECTION_SECONDS)
                if self._context is not None:
                    served = self._context.wrap_socket(
                        request, server_side=True, do_handshake_on_connect=False
                    )
                    self._since[served] = self._since.pop(request)  # the wrapped socket is no connection now
                    served.do_handshake()
                self.finish_request(served, client_address)
            self.shutdown_request(served)
        finally:
            self._since.pop(served, None)
            self._slots.release()

    def service_actions(self) -> None:
        """End connections that last too long: called twice a second."""
        late = time.monotonic() - CONNECTION_SECONDS
        for request, since in list(self._since.items()):
            if since < late:
                with contextlib.suppress(OSError):  # not TLS's own, which would read on in the clear
                    socket.socket.shutdown(request, socket.SHUT_RDWR)
