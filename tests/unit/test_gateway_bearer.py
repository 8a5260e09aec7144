"""Bearer keys: who gets which routes of the gateway."""

import httpx
import pytest
import zmq
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from seer.cli.keys import add, init, revoke
from seer.common.config import Config, GatewayConfig, SecurityConfig
from seer.common.errors import ConfigError
from seer.common.net.keys import Peers, read_secret
from seer.gateway import bearer
from seer.gateway.bearer import CONTROL, DATA, Bearer, client_of
from seer.gateway.sockets import listen_on_both


@pytest.fixture
def folder(tmp_path):
    init(tmp_path / "keys")
    add(tmp_path / "keys", ["http:agent", "trainer:run"], "")
    return tmp_path / "keys"


def secret(folder, name):
    return read_secret(folder / f"{name}.key")[1]


class Server:
    """An application behind keys; `bodies` are what it read."""

    def __init__(self, folder, roles):
        self.bodies = []

        async def generate(request):
            self.bodies.append(await request.body())
            self.client = client_of(request)
            return PlainTextResponse("tokens")

        async def health(request):
            return PlainTextResponse("fine")

        routes = [
            Route("/generate", generate, methods=["POST"]),
            Route("/health", health),
            Route("/ping", health),
        ]
        self._app = Bearer(Starlette(routes=routes), Peers(folder / "public" / "peers"), roles)

    async def post(self, header=None, path="/generate"):
        headers = {} if header is None else {"authorization": header}
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(path, content=b"prompt", headers=headers)

    async def get(self, path):
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.get(path)


@pytest.mark.parametrize(
    ("user", "name"), [("http:agent", "agent"), ("http:*", ""), ("http:" + "x" * 600, "x" * 512)]
)
async def test_a_request_has_the_name_of_its_key(folder, user, name):
    server = Server(folder, DATA)
    public, given = (key.decode() for key in zmq.curve_keypair())
    with (folder / "public" / "peers").open("a") as peers:
        peers.write(f"{user} {public}\n")
    assert (await server.post(f"Bearer {given}")).status_code == 200
    assert server.client == name


async def test_a_request_needs_a_key_that_is_in_the_list(folder):
    server = Server(folder, DATA)
    good = f"Bearer {secret(folder, 'http-agent')}"
    assert (await server.post(good)).text == "tokens"
    assert (await server.post(good.replace("Bearer", "bearer"))).status_code == 200
    wrong = [None, "", "Bearer", "Bearer ", "Basic abc", f"Bearer {'x' * 40}", f"Bearer {good[7:][::-1]}"]
    for header in wrong:
        refused = await server.post(header)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, 401), header
        assert refused.headers["www-authenticate"] == "Bearer"
    assert (await server.post(None, "/nowhere")).status_code == 401
    assert server.bodies == [b"prompt"] * 2
    assert [(await server.get(path)).text for path in ("/health", "/ping")] == ["fine"] * 2


async def test_a_revoked_key_is_refused_at_once(folder):
    server, header = Server(folder, DATA), f"Bearer {secret(folder, 'http-agent')}"
    assert (await server.post(header)).status_code == 200
    revoke(folder, ["http:agent"])
    assert (await server.post(header)).status_code == 401


async def test_control_routes_are_for_operators(folder):
    data, control = Server(folder, DATA), Server(folder, CONTROL)
    for name, codes in (
        ("http-agent", (200, 403)),
        ("operator-owner", (200, 200)),
        ("trainer-run", (403, 403)),
    ):
        header = f"Bearer {secret(folder, name)}"
        assert ((await data.post(header)).status_code, (await control.post(header)).status_code) == codes, (
            name
        )
    assert (await control.get("/health")).status_code == 200


async def test_keys_that_are_kept_are_bounded(folder, monkeypatch):
    monkeypatch.setattr(bearer, "MOST_KNOWN", 2)
    server = Server(folder, DATA)
    made = add(folder, [f"http:agent{number}" for number in range(5)], "")
    for path in made * 2:
        assert (await server.post(f"Bearer {read_secret(path)[1]}")).status_code == 200
    assert len(server._app._public) == 2


def test_without_keys_nothing_is_bound_where_strangers_reach_it(tmp_path):
    open_to_all = GatewayConfig(data="0.0.0.0:0", control="127.0.0.1:0")
    with pytest.raises(ConfigError, match=r"gateway.data = '0.0.0.0:0' would be open"):
        listen_on_both(Config(gateway=open_to_all))
    for security in (SecurityConfig(insecure=True), SecurityConfig(peers="list")):
        for each in listen_on_both(Config(gateway=open_to_all, security=security)).values():
            each.close()
    with pytest.raises(ConfigError, match="give both, or neither"):
        listen_on_both(Config(gateway=GatewayConfig(tls_key="key.pem")))
