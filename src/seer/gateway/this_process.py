"""The requests of this process, and the models that they may name, as a `control.Process`."""

from __future__ import annotations

from seer.gateway.control import Abort, Counts, Idle, Loaded, Order, Pause, Resume
from seer.gateway.models import Models
from seer.gateway.open_requests import OpenRequests


class ThisProcess:
    """Obeys the orders of `Control`."""

    def __init__(self, requests: OpenRequests, models: Models) -> None:
        self._requests = requests
        self._models = models

    async def __call__(self, order: Order) -> object:
        """Do what is asked; return the answer."""
        requests = self._requests
        match order:
            case Pause():
                requests.pause(abort=order.abort)
            case Abort():
                requests.abort()
            case Idle():
                return await requests.idle(order.seconds)
            case Resume():
                requests.resume()
            case Loaded():
                self._models.loaded(order.adapter, order.loading)
            case Counts():
                now = {"open_requests": requests.open_requests, "under_way": requests.under_way}
                return {**requests.counters, "processes": 1, **now}
        return None
