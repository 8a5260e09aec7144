"""The gateway's side of a buffer: one client that is kept connected, and an open rollout for each key.

Invariants:
- while the buffer does not answer, or no engine can work, `check` raises a 503 at once;
- a client that lost its buffer is replaced, for as long as the gateway runs; a buffer that comes back in
  time goes on with what was submitted;
- every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from seer.client import (
    Delta,
    Group,
    OpenRollout,
    Placed,
    Prompt,
    PromptInFlight,
    RolloutCancelled,
    RolloutClient,
    SamplingParams,
)
from seer.common.config import Config
from seer.common.errors import SeerError
from seer.common.net.transport.base import Transport
from seer.common.process.log import get_logger
from seer.common.types import Capacity
from seer.common.wire import Status, Tokens
from seer.gateway.errors import HttpError
from seer.gateway.group_names import Place

STATUS_SECONDS = 1.0
"""How often the buffer is asked for its status; it is away when it does not answer in three times that."""

SILENCE_SECONDS = 60.0
"""A buffer that sends nothing for this long is lost: what was submitted fails, and a new client is opened."""

CANCEL_SECONDS = 5.0
"""Longest time to tell the buffer of a cancellation; untold, the buffer ends the work by itself."""

_log = get_logger()


Sink = Callable[[Place, Delta | Group], Awaitable[None]]
"""Takes what comes of a prompt, by its place: tokens as chunks end, then its group.

The group has what was not handed over of its responses, and at least their ends.
"""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of all prompts alike. With a `session`, or with `images`, there is one prompt.

    `client`: the name of the key that it came with; empty: none.
    """

    n: int
    sampling: SamplingParams
    seed: int
    session: str | None = None
    images: Sequence[Placed] = ()
    client: str = ""


@dataclass
class Outcome:
    """What came of prompts, by their places. A weight update ended the prompts that are not in `groups`, and
    `discarded` tokens with these prompts.
    """

    groups: dict[Place, Group] = field(default_factory=dict)
    discarded: int = 0


class BufferClient:
    """Use as `async with BufferClient(config, transport)`."""

    def __init__(self, config: Config, transport: Transport) -> None:
        self._endpoint = config.endpoints.trainers
        self._security = config.security
        self._transport = transport
        self._client: RolloutClient | None = None
        self._rollouts: dict[str, OpenRollout] = {}
        self._numbers = itertools.count()
        self._problem = "no answer yet"
        self._keeper: asyncio.Task[None] | None = None
        self.status: Status | None = None
        self._capacities: list[Capacity] = []

    async def __aenter__(self) -> BufferClient:
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])

    @property
    def client(self) -> RolloutClient:
        """The connected client. Raises a 503 while the buffer is away."""
        if self._client is None or self._problem:
            raise HttpError(503, f"the buffer at {self._endpoint} is away: {self._problem}")
        return self._client

    def engines(self) -> int:
        """Return the number of engines, asleep and loading ones too, not quarantined ones; or raise 503."""
        _ = self.client
        status = self.status
        if status is None or not (status.engines or status.instances):
            raise HttpError(503, "no engine is there: start one")
        able = status.engines - len(status.quarantined) if status.engines else len(status.instances)
        if able < 1:
            raise HttpError(503, "all engines are in quarantine: seer status says why")
        return able

    def capacities(self) -> list[Capacity]:
        """Return the engines' capacities, the last ones while all load or sleep. Raises like `engines`."""
        self.engines()
        if not self._capacities:
            raise HttpError(503, "no engine is ready yet")
        return self._capacities

    @property
    def max_model_len(self) -> int | None:
        """Return the longest sequence that an engine takes; None: none has been there yet."""
        return max((each.room(0) for each in self._capacities), default=None)

    async def generate(
        self,
        prompts: Mapping[Place, Tokens],
        asks: Question,
        sink: Sink | None = None,
    ) -> Outcome:
        """Return n responses to each prompt, by place; `sink` gets them as they are generated.

        If the call is cancelled, so are the prompts in the buffer.
        """
        rollout = self._rollout_for(asks.client)
        asked = {
            place: rollout.submit(
                Prompt(f"{next(self._numbers)}", token_ids=ids, images=asks.images), n=asks.n,
                sampling=asks.sampling, seed=asks.seed, weight_version=-1, group=place.group,
                first_index=place.first_index, stream=sink is not None, session=asks.session,
            )
            for place, ids in prompts.items()
        }  # fmt: skip
        outcome = Outcome()
        try:
            if sink is None:
                for place, prompt in asked.items():
                    with contextlib.suppress(RolloutCancelled):
                        outcome.groups[place] = await prompt.result()
            else:
                async with asyncio.TaskGroup() as tasks:
                    for place, prompt in asked.items():
                        tasks.create_task(_hand_over(place, prompt, sink, outcome))
        finally:
            left = [prompt for place, prompt in asked.items() if place not in outcome.groups]
            if left:
                await _cancel(left)
        outcome.discarded = sum(prompt.discarded for prompt in left)
        return outcome

    def _rollout_for(self, client: str) -> OpenRollout:
        """Return the rollout of requests of a client of this name. Raises a 503."""
        connected, rollout = self.client, self._rollouts.get(client)
        if rollout is None:
            # A place and a seed fix the noise, for every incarnation: see `group_names`.
            self._rollouts[client] = rollout = connected.open_rollout(rollout_number=0, repeat=True)
            rollout.client = client
        return rollout

    async def fresh_status(self) -> Status:
        """Ask the buffer. Raises `Unreachable`."""
        return await self.client.status(3 * STATUS_SECONDS)

    async def _keep(self) -> None:
        while True:
            try:
                async with RolloutClient(
                    self._endpoint, transport=self._transport, silence_seconds=SILENCE_SECONDS,
                    connect_seconds=3 * STATUS_SECONDS, security=self._security,
                ) as client:  # fmt: skip
                    self._client = client
                    await self._watch(client)
            except SeerError as error:
                self._lost(str(error))
            finally:
                self._client, self._rollouts = None, {}
            await asyncio.sleep(STATUS_SECONDS)

    async def _watch(self, client: RolloutClient) -> None:
        """Ask for the status until there was none for `SILENCE_SECONDS`."""
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while loop.time() < heard + SILENCE_SECONDS:
            try:
                self._take(await client.status(3 * STATUS_SECONDS))
                heard = loop.time()
                if self._problem:
                    _log.info("the buffer is there", endpoint=self._endpoint)
                self._problem = ""
            except SeerError as error:
                self._lost(str(error))
            await asyncio.sleep(STATUS_SECONDS)

    def _take(self, status: Status) -> None:
        self.status = status
        if status.instances:
            self._capacities = [each.capacity for each in status.instances]

    def _lost(self, problem: str) -> None:
        if not self._problem:
            _log.warning("the buffer is away", endpoint=self._endpoint, problem=problem)
        self._problem = problem


async def _hand_over(place: Place, prompt: PromptInFlight, sink: Sink, outcome: Outcome) -> None:
    with contextlib.suppress(RolloutCancelled):
        async for delta in prompt.tokens():
            if prompt.ended:  # the group has the rest; of a cancelled prompt nothing more should be sent
                break
            await sink(place, delta)
        outcome.groups[place] = await prompt.result()
        await sink(place, outcome.groups[place])


async def _cancel(prompts: Sequence[PromptInFlight]) -> None:
    with contextlib.suppress(SeerError, TimeoutError):
        async with asyncio.timeout(CANCEL_SECONDS):
            for prompt in prompts:
                await prompt.cancel()
