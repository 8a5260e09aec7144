"""`seer exporter`: a system's metrics for Prometheus, from a process of its own.

To make the text of a large system's metrics takes longer than the buffer's event loop may stand still, so
the buffer only answers `StatusRequest`s, and this process does the rest.

Invariants (tests/unit/test_exporter.py, tests/process/test_exporter.py):
- every scrape asks anew, and is answered within `ANSWER_SECONDS` and a little;
- a buffer that does not answer is `seer_up 0`, and no error; a buffer that is back is found again;
- the exporter may only look: an observer's key is enough.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from seer.common.clock import Clock
from seer.common.config import Config
from seer.common.endpoints import check_endpoint
from seer.common.errors import SeerError
from seer.common.net.keys import load_keys
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.observe.access import Access, WsgiApp
from seer.observe.http import MetricsServer
from seer.observe.metrics import families
from seer.observe.observer import Observer, Seen

ANSWER_SECONDS = 5.0
"""How long the buffer has to answer, if who scrapes waits longer; Prometheus waits for 10 s by default."""

PATIENCE = "HTTP_X_PROMETHEUS_SCRAPE_TIMEOUT_SECONDS"
"""The header in which Prometheus says how long it waits."""

SHARE = 0.6
"""The buffer's share of that time: an answer of `seer_up 0` has to be in time, too."""

_seconds: ContextVar[float] = ContextVar("seconds", default=ANSWER_SECONDS)


class Exporter(Collector):
    """The service; `listen` is host and port. Raises `ConfigError`."""

    def __init__(
        self,
        config: Config,
        transport: Transport,
        clock: Clock,
        *,
        connect: str,
        listen: tuple[str, int],
        access: Access,
    ) -> None:
        check_endpoint("--connect", connect)
        access.check(listen[0], config.security.insecure)
        self._observer = Observer(connect, transport, load_keys(config.security), clock)
        self._listen, self._access, self._connect = listen, access, connect
        self._log = get_logger()
        self._drained = asyncio.Event()
        self._problem = ""

    async def start(self) -> dict[str, str]:
        """Serve from now on; return the address."""
        self._loop = asyncio.get_running_loop()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        app = self._access.guard(_in_time(make_wsgi_app(registry)))
        context = self._access.context()
        self._server = MetricsServer(*self._listen, app, context)
        self._server.start()
        host = f"[{self._listen[0]}]" if ":" in self._listen[0] else self._listen[0]
        return {"metrics": f"http{'s' if context else ''}://{host}:{self._server.port}/metrics"}

    async def run(self) -> None:
        """Serve until drained."""
        try:
            await self._drained.wait()
        finally:
            await asyncio.to_thread(self._server.stop)
            self._observer.close()

    def drain(self) -> None:
        """End: nobody depends on one more scrape."""
        self._drained.set()

    def collect(self) -> Iterator[Metric]:
        """Ask, and yield all metrics; called on a thread of the server's."""
        asked = asyncio.run_coroutine_threadsafe(self._look(_seconds.get()), self._loop)
        yield from families(asked.result(3 * ANSWER_SECONDS))

    async def _look(self, seconds: float) -> Seen | None:
        try:
            seen = await self._observer.look(seconds)
        except SeerError as error:
            self._note(str(error))
            return None
        self._note("")
        return seen

    def _note(self, problem: str) -> None:
        """Log when the buffer goes away, and when the buffer is back."""
        if problem and not self._problem:
            self._log.warning("the buffer does not answer", endpoint=self._connect, why=problem)
        elif self._problem and not problem:
            self._log.info("the buffer answers again", endpoint=self._connect)
        self._problem = problem


def _in_time(app: WsgiApp) -> WsgiApp:
    """Return `app` with the deadline that whoever scrapes asks for."""

    def timed(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        try:
            patience = float(environ.get(PATIENCE, ""))
        except ValueError:
            patience = math.inf
        _seconds.set(min(ANSWER_SECONDS, SHARE * patience) if patience > 0 else ANSWER_SECONDS)
        return app(environ, start)

    return timed
