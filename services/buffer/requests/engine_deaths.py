"""Which requests may be what kills engines: those that ran on several engines that died.

An engine counts as dead when its connection breaks. If only the connection broke, the same incarnation of the
engine registers again, and does not count any more.

Invariants (tests/unit/test_buffer_losses.py, tests/invariants.py):
- a request has the incarnations of the engines that died while they ran it, since its last chunk that ended;
  at most `MAX_DEAD_INCARNATIONS` incarnations are remembered over all requests;
- a suspect that ran alone on an engine that died waits: until that incarnation registers again, which clears
  it, or until another incarnation of the engine does, or `RETURN_SECONDS` have passed;
- then it runs alone once more, and fails only if `BLAMED_DEATHS` engines have died with it: the engine it ran
  on first may have been dead before the suspect came, as one that dies beside others is noticed later;
- time in which this process stalled does not count towards `RETURN_SECONDS`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping

from seer.services.buffer.requests.state import RequestState

SUSPECT_DEATHS = 3
"""Engines that died with a request before it is suspected to be the cause."""

BLAMED_DEATHS = SUSPECT_DEATHS + 2
"""Engines that died with a request, on the last two of which it ran alone, before it fails."""

RETURN_SECONDS = 30.0
"""An engine of which only the connection broke is back by then: vanished hosts are noticed after 10 s."""

STALL_SECONDS = 10.0
"""A longer time between two ticks is a stall of this process, in which it received nothing."""

MAX_DEAD_INCARNATIONS = 1000
"""Bound on the incarnations of dead engines that are remembered."""


class EngineDeaths:
    """`requests`: all unfinished requests by id. Times are monotonic seconds."""

    def __init__(self, requests: Mapping[str, RequestState]) -> None:
        self._requests = requests
        self.lost_alone: dict[str, tuple[str, int, float]] = {}  # by request: engine, incarnation, since when
        self._maybe_damaged: set[str] = set()  # engines on which a request that ran alone was aborted
        self._dead_incarnations: OrderedDict[int, set[str]] = OrderedDict()  # the requests of each
        self._last_tick: float | None = None

    def is_suspect(self, request: RequestState) -> bool:
        """Return whether a request has to run alone."""
        return len(request.deaths) >= SUSPECT_DEATHS

    def is_conclusive(self, instance: str) -> bool:
        """Return whether the death of an engine now would be the fault of the one request that runs there."""
        return instance not in self._maybe_damaged

    def died(self, instance: str, incarnation: int, running: Collection[str], now: float) -> None:
        """Record that an engine died while it ran these requests.

        A suspect that did not count as alone is not accused: an earlier one may have damaged the engine.
        """
        for request_id in running:
            request = self._requests[request_id]
            if request.alone:
                self.lost_alone[request_id] = (instance, incarnation, now)
            elif self.is_suspect(request):
                continue
            request.deaths |= {incarnation}
            self._dead_incarnations.setdefault(incarnation, set()).add(request_id)

    def engines_left(self, instances: Iterable[str]) -> None:
        """Forget engines that are gone, and the oldest incarnations if there are too many."""
        self._maybe_damaged.difference_update(instances)
        while len(self._dead_incarnations) > MAX_DEAD_INCARNATIONS:
            incarnation, request_ids = self._dead_incarnations.popitem(last=False)
            for request_id in request_ids:
                self._requests[request_id].deaths -= {incarnation}

    def engine_joined(self, incarnation: int) -> None:
        """Record that this incarnation of an engine is not dead."""
        for request_id in self._dead_incarnations.pop(incarnation, ()):
            self._requests[request_id].deaths -= {incarnation}

    def chunk_ended(self, instance: str) -> None:
        """Record that an engine works."""
        self._maybe_damaged.discard(instance)

    def clear(self, request: RequestState) -> None:
        """Forget which engines died with a request."""
        for incarnation in request.deaths:
            self._dead_incarnations[incarnation].discard(request.view.request_id)
            if not self._dead_incarnations[incarnation]:
                del self._dead_incarnations[incarnation]
        request.deaths = frozenset()

    def remove(self, request: RequestState) -> None:
        """Forget a request that ends early; it may be running."""
        if request.alone:
            self._maybe_damaged.add(request.instance)
        self.lost_alone.pop(request.view.request_id, None)
        self.clear(request)

    def decided(self, instance: str, incarnation: int, now: float) -> Iterator[tuple[RequestState, bool]]:
        """Yield requests lost alone whose engine came back, or will not; and whether they are to blame.

        `instance` and `incarnation` are those of an engine that registers now. The caller removes what fails.
        """
        for request_id, (name, lost, since) in list(self.lost_alone.items()):
            if request_id not in self.lost_alone:
                continue  # its group has just failed
            returned = (name, lost) == (instance, incarnation)
            if returned or name == instance or now - since > RETURN_SECONDS:
                request = self._requests[request_id]
                blamed = not returned and len(request.deaths) >= BLAMED_DEATHS
                if not blamed:
                    del self.lost_alone[request_id]
                yield request, blamed

    def tick(self, now: float) -> None:
        """Do not count the time of a stall: an engine that is back may not have been read yet."""
        stalled = 0.0 if self._last_tick is None else max(0.0, now - self._last_tick - STALL_SECONDS)
        self._last_tick = now
        for request_id, (name, incarnation, since) in self.lost_alone.items():
            self.lost_alone[request_id] = (name, incarnation, min(now, since + stalled))
