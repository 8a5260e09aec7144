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


class Gateway(Serving):
    """The service with one process. The buffer may come later."""

    async def start(self) -> dict[str, str]:
        """Bind, and read the tokenizer."""
        sockets = listen_on_both(self._config)
        control = Control(self._config, self.buffer, [self.process])
        self.load(ControlRoutes(self._config, control).handle, sockets)
        return {f"gateway.{name}": url_of(each, self._config.gateway) for name, each in sockets.items()}


def make(config: Config, transport: Transport, clock: Clock) -> Service:
    """Return the service."""
    return Gateway(config, transport) if config.gateway.workers == 1 else WorkerSupervisor(config, transport)
