"""Who may use the gateway: bearer keys, from the same list as the keys of sockets (`common/net/keys.py`).

A bearer key is the secret of a pair that `seer keys add DIR http:NAME` made; the list has the public key.

Invariants (tests/unit/test_gateway_bearer.py asserts them):
- with a list, nothing but `GET /health` and `GET /ping` is answered to a request without a key that the list
  has at the time;
- a key for `http` generates and asks; all other routes are for operators;
- a request that is refused is answered before its body is read.
"""

from __future__ import annotations

from collections import OrderedDict

import zmq
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from seer.common.net.keys import ANY_NAME, HTTP, KEY_LENGTH, OPERATOR, Peers, User
from seer.common.wire import MAX_ID
from seer.gateway.errors import HttpError
from seer.gateway.http import refusal

DATA = frozenset({HTTP, OPERATOR})
CONTROL = frozenset({OPERATOR})
"""Roles of keys for the two addresses."""

OPEN_PATHS = frozenset({"/health", "/ping"})
"""For probes: they say nothing but whether generation is possible."""

NO_KEY = "send 'Authorization: Bearer KEY', a key that `seer keys add DIR http:NAME` made and nobody revoked"

MOST_KNOWN = 4096
"""Bound on secrets whose public keys are kept: each takes 50 µs to compute."""


_CLIENT = "seer.client"
"""Where an ASGI scope has the name of the key that the request came with."""


def client_of(request: Request) -> str:
    """Return the name of the key that a request came with; empty: it has none, or one for any name."""
    return str(request.scope.get(_CLIENT, ""))


class Bearer:
    """An ASGI application that lets holders of keys through; `roles`: the roles that the routes are for."""

    def __init__(self, app: ASGIApp, peers: Peers, roles: frozenset[str]) -> None:
        self._app = app
        self._peers = peers
        self._roles = roles
        self._public: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI), or refuse it."""
        if scope["type"] == "http":
            request = Request(scope)
            try:
                scope[_CLIENT] = self._check(request)
            except HttpError as error:
                response = refusal(error)
                response.headers["connection"] = "close"
                if error.status == 401:
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> str:
        """Return the name of the request's key. Raises `HttpError`."""
        if request.method == "GET" and request.url.path in OPEN_PATHS:
            return ""
        user = self._user(request.headers.get("authorization", ""))
        if user is None:
            raise HttpError(401, NO_KEY)
        if user.role not in self._roles:
            roles = ", ".join(sorted(self._roles))
            raise HttpError(403, f"the key is for {user}; this address is for {roles}")
        return "" if user.name == ANY_NAME else user.name[:MAX_ID]

    def _user(self, header: str) -> User | None:
        scheme, _, secret = header.partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or len(secret) != KEY_LENGTH:
            return None
        public = self._public.get(secret)
        if public is None:
            try:
                public = zmq.curve_public(secret.encode("ascii")).decode()
            except (zmq.ZMQError, UnicodeEncodeError):
                return None
            if self._peers.find(public) is None:  # strangers' keys are not kept
                return None
            self._public[secret] = public
            if len(self._public) > MOST_KNOWN:
                self._public.popitem(last=False)
        return self._peers.find(public)
