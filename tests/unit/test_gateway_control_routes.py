"""Control routes: what the table of handlers answers."""

from collections import Counter

import httpx
from starlette.applications import Starlette

from seer.common.config import Config
from seer.gateway.control_routes import ControlRoutes, control_routes
from seer.gateway.process_calls import LinkLost
from seer.gateway.worker import CALL_SECONDS, ControlRelay


class Control:
    paused = True


async def test_a_head_is_answered_as_the_get_of_its_path():
    routes = control_routes(ControlRoutes(Config(), Control()).handle, Counter())
    transport = httpx.ASGITransport(Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.head("/is_paused")).status_code == 200
        assert (await client.get("/is_paused")).json() == {"is_paused": True}


async def test_who_asks_a_first_process_that_is_away_or_stuck_is_told_in_time():
    class Link:
        async def call(self, *_, seconds):
            assert seconds <= 2 * CALL_SECONDS
            raise self.error

    link = Link()
    routes = control_routes(ControlRelay(link, Config()).handle, Counter())
    transport = httpx.ASGITransport(Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for link.error, status in ((LinkLost("it has ended"), 503), (TimeoutError(), 504)):
            assert (await client.get("/is_paused")).status_code == status
