"""One rank's side of a weight update that all ranks of a trainer make together.

Invariants (tests/cluster/test_sharded_weights.py):
- each rank sends its share of the stream, or of the delta in its place;
- the first rank asks for the update; its outcome, an answer or an error, is every rank's. Until then all
  ranks stay, since a restarted buffer needs all parts again;
- every rank makes the same collective calls in the same order, also once its own update was cancelled;
- a rank that ends early ends the update on all: the buffer gives the stream up once it does not grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import NamedTuple

from seer.client.sent_weights import Plan, SentWeights
from seer.client.sharded_tensors import ShardedTensors
from seer.client.tensor_stream import TensorStream
from seer.client.upload import Send
from seer.client.weight_update import InFlight, Source, Update
from seer.common.errors import InvalidField, SeerError, Unreachable, WeightsRefused
from seer.common.process.log import get_logger
from seer.common.weights.digest import BLAKE3
from seer.common.wire import SPOOL_SCHEME, SPOOL_STALLED, WeightsFailed, WeightsLive

TELL_SECONDS = 60.0
"""How long the first rank waits for the others to hear how an update ended."""

_log = get_logger()


class _Told(NamedTuple):
    """What the first rank tells: the answer, or reasons as in `WeightsRefused`.

    `whole`: no delta, or a delta of which a rank sent nothing more; that rank would send no stream, either.
    """

    outcome: WeightsLive | dict[str, str]
    whole: bool

    def again(self) -> bool:
        """Whether the ranks send all of the stream next: engines refused what a delta made."""
        return not (self.whole or isinstance(self.outcome, WeightsLive)) and any(self.outcome)


_ENDED = _Told({"": "the first rank ended the update"}, whole=True)

_Heard = Plan | _Told | Exception


class ShardedUpdate(Update):
    """See `Update`."""

    def __init__(
        self,
        version: int,
        source: ShardedTensors,
        digest: str,
        in_flight: InFlight,
        deltas: SentWeights | None = None,
        base: int | None = None,
    ) -> None:
        super().__init__(version, source, digest, in_flight, deltas, base)
        self._source = source
        self._asked = {"version": version, "digest": digest, "in_flight": in_flight, "base": base}
        self._outcomes: queue.SimpleQueue[_Told] = queue.SimpleQueue()  # of the first rank
        self._heard: asyncio.Queue[_Heard] = asyncio.Queue()  # at most three
        self._told: _Told | None = None

    async def run(self, send: Send, tag: str = BLAKE3) -> WeightsLive:
        """See `Update.run`."""
        try:
            return await super().run(send, tag)
        finally:
            self._outcomes.put(_ENDED)  # unless it has told another end

    def _collective(self) -> Iterator[_Heard]:
        """Make all collective calls of the update. Each blocks until all ranks have made it."""
        source, ranks = self._source, self._source.ranks
        with ranks.turn:
            found = ranks.gather((self._name, self._tag, self._asked))
            self._name, self._tag, first = found[0]
            for rank, (*_, asked) in enumerate(found):
                for name, value in asked.items():
                    if value != first[name]:
                        raise InvalidField(
                            name, value, f"give the same on ranks 0 and {rank}: {first[name]!r}"
                        )
            yield self._deltas.plan(source.stream, self._base, source, self._tag)
            again = True
            while again:
                told: _Told = ranks.tell(self._outcomes.get() if self._rank == 0 else None)
                yield told
                again = told.again()

    async def _planned(self, stream: TensorStream) -> Plan:
        _on_a_thread(self._collective(), self._heard)
        plan = await self._heard.get()
        if isinstance(plan, SeerError):
            raise plan
        if not isinstance(plan, Plan):
            raise Unreachable(f"not all ranks began the update: {plan}")
        self.request.source = SPOOL_SCHEME + self._name
        return plan

    def _sent_whole(self) -> bool:
        return super()._sent_whole() if self._told is None else self._told.whole

    async def _run(self, send: Send) -> WeightsLive:
        self._told = None
        if self._rank == 0:
            return await self._lead(send)
        listening = asyncio.create_task(self._listen())
        try:
            return await super()._run(send)
        finally:
            listening.cancel()

    async def _lead(self, send: Send) -> WeightsLive:
        outcome = _ENDED.outcome
        try:
            outcome = live = await super()._run(send)
        except SeerError as error:
            outcome = error.reasons if isinstance(error, WeightsRefused) else {"": str(error)}
            raise
        finally:
            stalled = isinstance(outcome, dict) and any(SPOOL_STALLED in why for why in outcome.values())
            self._told = _Told(outcome, stalled or self._sent_whole())
            self._outcomes.put(self._told)
            try:
                heard = await asyncio.wait_for(self._heard.get(), TELL_SECONDS)
            except TimeoutError as error:
                heard = error
            if isinstance(heard, Exception):
                _log.warning("not all ranks heard how the update ended", error=repr(heard))
        return live

    async def _listen(self) -> None:
        """Settle this rank's update by what the first one tells."""
        told = await self._heard.get()
        if not isinstance(told, _Told):
            self.fail(Unreachable(f"the first rank told no outcome of the update: {told}"))
            return
        self._told = told
        if self._answer.done():
            return
        if isinstance(told.outcome, WeightsLive):
            self._answer.set_result(told.outcome)
        else:
            self._answer.set_result(WeightsFailed(version=self.request.version, reasons=told.outcome))


def _on_a_thread(calls: Iterator[_Heard], heard: asyncio.Queue[_Heard]) -> None:
    """Have what calls return be heard. They may block for ever: then their thread ends with the process."""
    loop = asyncio.get_running_loop()

    def hear(each: _Heard) -> None:
        # Once the loop has ended, other ranks still wait for the next call.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(heard.put_nowait, each)

    def run() -> None:
        try:
            for each in calls:
                hear(each)
        except Exception as failed:  # noqa: BLE001 - whoever awaits it gets it
            hear(failed)

    threading.Thread(target=run, name="ranks", daemon=True).start()


def update_of(
    version: int, source: Source, digest: str, in_flight: InFlight, deltas: SentWeights, base: int | None
) -> Update:
    """Return an update from a source of any kind. Raises `InvalidField`."""
    if isinstance(source, ShardedTensors):
        return ShardedUpdate(version, source, digest, in_flight, deltas, base)
    return Update(version, source, digest, in_flight, deltas, base)
