"""The service of `seer gateway`: one process that serves, or several and one that starts and tells these."""

from __future__ import annotations

from seer.common.clock import Clock
from seer.common.config import Config
from seer.common.net.transport.base import Transport
from seer.common.process.service import Service
from seer.gateway.control import Control
from seer.gateway.control_routes import ControlRoutes
from seer.gateway.serving import Serving
from seer.gateway.sockets import listen_on_both, url_of
from seer.gateway.supervisor import WorkerSupervisor


class Gateway:
    """The service with one process. The buffer may come later."""

    def __init__(self, config: Config, transport: Transport) -> None:
        self._config = config
        self._serving = Serving(config, transport)

    async def start(self) -> dict[str, str]:
        """Bind, and read the tokenizer."""
        sockets = listen_on_both(self._config)
        serving = self._serving
        control = Control(self._config, serving.buffer, [serving.process])
        serving.load(ControlRoutes(self._config, control).handle, sockets)
        return {f"gateway.{name}": url_of(each, self._config.gateway) for name, each in sockets.items()}

    async def run(self) -> None:
        """Serve until drained."""
        await self._serving.run()

    def drain(self) -> None:
        """See `Serving.drain`."""
        self._serving.drain()


def make(config: Config, transport: Transport, clock: Clock) -> Service:
    """Return the service."""
    return Gateway(config, transport) if config.gateway.workers == 1 else WorkerSupervisor(config, transport)
