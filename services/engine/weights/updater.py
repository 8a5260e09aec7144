"""New weights for one engine, and sleep: a buffer's orders, carried out one after the other.

Invariants (tests/unit/test_engine_orders.py asserts them):
- new weights are checked while the live ones generate, and laid out for the load if any chunk runs; they are
  loaded while nothing runs; after a failed load, or sleep at level 2, the engine has no weights, and runs
  nothing, until another load succeeds;
- weights are loaded only while their memory is awake; that of the KV cache may sleep;
- only what was checked is loaded (`checker.py`), also if it was laid out before;
- weights in place are received only if `engine.in_place_updates` allows it, and their plan fits the model; an
  engine that does not receive all of them by `engine.in_place_seconds` ends;
- an adapter is merged into the model that the engine was started with, whatever is live;
- copies of streamed weights are deleted after the load, or when the update fails or is cancelled; one to
  which deltas may follow is kept while it is live;
- when the buffer is gone, its queued orders are dropped, and the current one is not answered. That changes
  nothing any more, unless it is already loading or going to sleep: then the next buffer hears the result.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from seer.common import wire
from seer.common.errors import EngineBroken, EngineError, InvalidField, SeerError
from seer.common.net.node import node_id
from seer.common.sleep import SleepState
from seer.common.types import Capacity
from seer.common.weights.digest import BLAKE3, tag_of
from seer.common.weights.in_place import is_in_place
from seer.common.weights.lora import is_adapter
from seer.services.engine.driver import Driver
from seer.services.engine.weights.checker import CheckedWeights, WeightChecker
from seer.services.engine.weights.fetcher import Send, WeightFetcher
from seer.services.engine.weights.holders import Peers

if TYPE_CHECKING:
    from seer.services.engine.nodes.leader import Leader
    from seer.services.engine.server import EngineServer

UNDEFINED = -1
"""Weight version of an engine whose last load failed, or that dropped its weights: it must not generate."""

MAX_ORDERS = 64
"""Bound on orders that wait: a buffer gives one or two per update."""

Order = wire.PrepareWeights | wire.DiscardWeights | wire.LoadWeights | wire.Sleep
Answer = wire.WeightsPrepared | wire.WeightsLoaded | wire.Slept


@dataclass(frozen=True, slots=True)
class LiveWeights:
    """The weights an engine generates with; `source` is empty for the model it was started with."""

    version: int = 0
    digest: str = ""
    source: str = ""


class WeightUpdater:
    """Owns the order queue, the live and the dropped weights, and what of the engine sleeps.

    `dropped`: the weights that were live before sleep at level 2, until some are loaded. `send` reaches the
    buffer, `peers` other engines; `root`: the folder that all weights must lie in, if not empty. `name`: the
    engine's; `in_place_seconds`: deadline for weights in place, None refuses them; `nodes`: those that have
    further ranks of it.
    """

    def __init__(
        self,
        driver: Driver,
        engine: EngineServer,
        send: Send,
        root: str,
        peers: Peers | None = None,
        name: str = "",
        in_place_seconds: float | None = None,
        nodes: Leader | None = None,
        *,
        finite: bool = True,
    ) -> None:
        self.live = LiveWeights()
        self.dropped: LiveWeights | None = None
        self.sleeping = SleepState.AWAKE
        self.wish = 0
        self.fetcher = WeightFetcher(send, root, peers)
        self.checker = WeightChecker(self.fetcher, in_place_seconds is not None, nodes, finite=finite)
        self._driver = driver
        self._engine = engine
        self._orders: asyncio.Queue[Order] = asyncio.Queue(MAX_ORDERS)
        self._preparing: asyncio.Task[wire.WeightsPrepared] | None = None
        self._laid_out: CheckedWeights | None = None
        self._cancelled_call_id = 0
        self._rejoins = 0
        self._name, self._in_place_seconds = name, in_place_seconds

    @property
    def not_ready(self) -> str:
        """Why the engine must not generate; empty: it may."""
        if self.sleeping:
            return "it sleeps"
        if self.live.version != UNDEFINED:
            return ""
        return f"it has no weights: {'the last load failed' if self.dropped is None else 'it dropped them'}"

    def registration(
        self, capacity: Capacity, versions: dict[str, str], weights_endpoint: str
    ) -> wire.Register:
        """Return what the engine tells a buffer when it joins."""
        known, dropped = self.dropped or self.live, self.dropped
        return wire.Register(
            capacity=capacity,
            weight_version=self.live.version,
            versions=versions,
            weights_digest=known.digest,
            weights_source=known.source,
            node=node_id(),
            weights_endpoint=weights_endpoint,
            sleeping=self.sleeping.tags,
            dropped_version=dropped.version if dropped is not None else -1,
            wish=self.wish,
        )

    async def start(self, model: str, head: str = "", tag: str = BLAKE3) -> None:
        """Read the model folder that the engine was started with, if it has one; `head`: its `drafts.head`.

        `tag`: its digest's. Raises `SeerError`.
        """
        self.checker.tag = tag_of(tag)
        if model:
            self.live = LiveWeights(digest=(await self.checker.start(Path(model), head)).digest)
            await self._driver.bind_weights(self.live.digest)

    def order(self, order: wire.PrepareWeights | wire.LoadWeights | wire.Sleep) -> None:
        """Queue an order. With a full queue it is lost: the buffer repeats it after its deadline."""
        if not self._orders.full():
            self._orders.put_nowait(order)

    def cancel(self, order: wire.DiscardWeights) -> None:
        """Stop checking the weights of a cancelled update, and queue the deletion of its copies."""
        self._cancelled_call_id = order.call_id
        if self._preparing is not None:
            self._preparing.cancel()
        if not self._orders.full():
            self._orders.put_nowait(order)

    def rejoined(self) -> None:
        """Forget all orders: the buffer that gave them is gone, or forgot this engine."""
        self._rejoins += 1
        while not self._orders.empty():
            self._orders.get_nowait()
        self.cancel(wire.DiscardWeights(version=0, call_id=0))

    async def run(self) -> None:
        """Carry out orders until cancelled. Raises `EngineError` when the engine cannot go on."""
        while True:
            order = await self._orders.get()
            rejoins, before = self._rejoins, (self.live, self.sleeping)
            answer = await self._carry_out(order)
            if rejoins == self._rejoins:
                if answer is not None:
                    self._engine.answer(answer)
            elif before != (self.live, self.sleeping):
                self._engine.register_again()
            if isinstance(order, wire.LoadWeights):
                await self._discard()  # takes as long as the disk does: nobody waits for that

    async def close(self) -> None:
        """Delete what was copied."""
        await self.checker.close()

    async def _carry_out(self, order: Order) -> Answer | None:
        match order:
            case wire.PrepareWeights():
                return await self._prepare_unless_cancelled(order)
            case wire.DiscardWeights():
                await self._discard()
                return None
            case wire.LoadWeights():
                return await self._load(order)
            case wire.Sleep():
                return await self._sleep(order)

    async def _prepare_unless_cancelled(self, order: wire.PrepareWeights) -> wire.WeightsPrepared | None:
        if 0 < order.call_id <= self._cancelled_call_id:
            return None
        self._preparing = asyncio.create_task(self._prepare(order))
        try:
            await asyncio.wait([self._preparing])
            if not self._preparing.cancelled():
                return self._preparing.result()
            await self._discard()
            return None
        finally:
            self._preparing.cancel()
            self._preparing = None

    async def _prepare(self, order: wire.PrepareWeights) -> wire.WeightsPrepared:
        answer = wire.WeightsPrepared(version=order.version, digest="", call_id=order.call_id)
        try:
            found = await self.checker.check(order.source, order.holders, order.digest)
            answer.digest = found.digest
            answer.problem = self.checker.differences(order.source, found)
            whole = not (is_in_place(order.source) or is_adapter(order.source))
            # Where nothing runs, nobody waits for a shorter pause.
            if whole and not answer.problem and self._engine.running:
                await self._lay_out(await self.checker.folder(order.source), found.digest)
        except EngineBroken:
            raise
        except SeerError as error:
            answer.problem = str(error)
        if answer.problem:
            await self._discard()
        return answer

    async def _lay_out(self, folder: Path | None, digest: str = "") -> None:
        """Have the backend do what it can of a load; without a folder: forget that, if it did."""
        if folder is not None or self._laid_out is not None:
            self._laid_out = self.checker.checked if folder is not None else None
            await self._driver.lay_out_weights(folder, digest)

    async def _discard(self) -> None:
        await self._lay_out(None)
        await self.checker.discard()

    async def _load(self, order: wire.LoadWeights) -> wire.WeightsLoaded:
        rejoins = self._rejoins
        answer = wire.WeightsLoaded(version=order.version, call_id=order.call_id)
        try:
            if (self.live.version, self.live.digest) == (order.version, order.digest):
                return answer  # an earlier buffer ordered it, too
            self._engine.drop_chunks()  # the buffer waits for none of them
            if self.sleeping is SleepState.ASLEEP:
                raise EngineError("it sleeps: wake its weights first")
            folder = await self.checker.checked_folder(order.source, order.digest, order.holders)
            if self._laid_out is not self.checker.checked:  # files were written since, and read again
                await self._lay_out(None)
            if rejoins != self._rejoins:  # the next buffer already relies on the live weights
                raise EngineError("the buffer that gave this order is gone")
            self.live, self.dropped = LiveWeights(version=UNDEFINED), None
            await self._replace(order, folder)
            if await self.checker.changed(folder):
                raise EngineError(f"{order.source} changed while it was loaded")
            self._engine.weights_loaded()
            self.live = LiveWeights(order.version, order.digest, order.source)
            self.checker.loaded()
        except EngineBroken as error:
            answer.problem = str(error)
            self._engine.answer(answer)
            raise
        except SeerError as error:
            answer.problem = str(error)
        return answer

    async def _replace(self, order: wire.LoadWeights, folder: Path) -> None:
        if is_in_place(order.source) and self._in_place_seconds is not None:
            seconds = self._in_place_seconds
            await self._driver.receive_weights(folder, self._name, order.digest, seconds)
        else:
            if not order.source:
                await self._driver.bind_weights(order.digest)  # which may have another tag than at the start
            base = self.checker.base if is_adapter(order.source) else None
            await self._driver.load_weights(folder, order.digest, base)

    async def _sleep(self, order: wire.Sleep) -> wire.Slept:
        """Free memory, or take it again. Raises `EngineError`: the engine is broken then."""
        problem, target = "", SleepState.ASLEEP
        try:
            target = target if order.asleep else self.sleeping.woken(order.tags)
        except InvalidField as error:
            problem, target = str(error), self.sleeping
        if target != self.sleeping:
            if target is SleepState.ASLEEP:  # from now on: a new buffer's chunks would run without memory
                self.sleeping = target
                if order.level > 1 and self.live.version != UNDEFINED:
                    self.live, self.dropped = LiveWeights(version=UNDEFINED), self.live
            await self._driver.sleep(target, order.level)
            self.sleeping = target
        self.wish = self.wish if problem else order.wish or self.wish
        return wire.Slept(
            asleep=bool(self.sleeping),
            problem=problem,
            tags=self.sleeping.tags,
            dropped=self.dropped is not None,
        )
