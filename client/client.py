"""The asyncio client of a buffer: one connection, any number of rollouts.

Invariants:
- one task receives and never sends, one task sends what receiving asks for: neither can block
  the other, nor the buffer;
- a buffer that was restarted, or forgot us, is sent every unfinished prompt again under the same
  rollout id: keys depend on neither, so the tokens are the same;
- what arrives is acknowledged, and what was given up is cancelled (`open_rollouts.py`);
- nothing waits for ever: a rollout ends by its results, its deadline or the buffer's silence.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from seer.client.open_rollouts import OpenRollouts
from seer.client.prompts import Prompt, check_request, check_rollout_id, prepare
from seer.client.rollout import BufferLost, Rollout, submissions
from seer.client.text import Tokenizer, load_tokenizer
from seer.client.weight_update import InFlight, Source, Update, answers, new_call_id
from seer.common.clock import LoopClock
from seer.common.errors import (
    InvalidField,
    RolloutFailed,
    SeerError,
    Unreachable,
)
from seer.common.ids import new_incarnation
from seer.common.net.channel import Channel
from seer.common.net.handshake import Identity
from seer.common.net.transport.base import Transport
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.types import SamplingParams
from seer.common.wire import (
    Accepted,
    BufferToTrainer,
    Goodbye,
    GroupDone,
    Progress,
    Refused,
    Sleep,
    Slept,
    SpoolState,
    Status,
    StatusRequest,
    Tokens,
    TrainerToBuffer,
    WeightsFailed,
    WeightsLive,
    Welcome,
)

PING_SECONDS = 5.0
"""A buffer that says nothing for this long is asked for its status: work may wait for an engine."""

GOODBYE_SECONDS = 2.0
"""Longest time that leaving may take when the buffer is gone."""


class RolloutClient:
    """Use as `async with RolloutClient(endpoint) as client`; one event loop, any task.

    `tokenizer` (a model folder, a tokenizer.json, or an object with encode and decode) is needed
    for text only. A buffer silent for `silence_seconds` while work is out has lost it:
    `BufferLost`. Entering raises `Unreachable` when it does not answer in `connect_seconds`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        name: str | None = None,
        tokenizer: str | Path | Tokenizer | None = None,
        connect_seconds: float = 30.0,
        silence_seconds: float = 60.0,
        transport: Transport | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        self._connect_seconds = connect_seconds
        self._silence_seconds = silence_seconds
        self._given_transport = transport
        self._task: asyncio.Task[None] | None = None
        self._next_number = 0
        self._next_submission = 0
        self._open = OpenRollouts(self.tokenizer)
        self._resubmit = False
        self._heard = 0.0
        self._wake = asyncio.Event()
        self._status_waiters: list[asyncio.Future[Status]] = []
        self._update: Update | None = None
        self._resting: tuple[Sleep, asyncio.Future[Slept]] | None = None
        self.weight_version = -1

    async def __aenter__(self) -> Self:
        self._transport = self._given_transport or ZmqTransport()
        incarnation = new_incarnation()
        self._next_submission = incarnation >> 1  # leaves room to count up
        me = Identity(role="trainer", name=self.name, incarnation=incarnation)
        self._channel: Channel[TrainerToBuffer, BufferToTrainer] = Channel(
            self._transport, self.endpoint, me, BufferToTrainer, LoopClock()
        )
        try:
            await self._channel.open(self._connect_seconds)
        except BaseException:
            await self._close_sockets()
            raise
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is unfinished and leave; idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                for rollout in self._open:
                    await self._cancel(rollout, ())
                await self._send_all(self._open.owed())
                await self._channel.send(Goodbye())
        except (Unreachable, TimeoutError):
            pass  # a buffer that is gone needs no goodbye
        finally:
            task.cancel()
            await asyncio.wait([task])
            await self._close_sockets()

    async def submit(
        self,
        prompts: Iterable[Prompt | str | Sequence[int] | Tokens],
        *,
        n: int = 8,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        rollout_number: int | None = None,
        deadline_seconds: float | None = None,
        rollout_id: str | None = None,
        weight_version: int | None = None,
    ) -> Rollout:
        """Send prompts for n responses each; plain prompts get their position as id.

        `rollout_number` is a coordinate of the noise key and defaults to one more than the highest so
        far. `weight_version` defaults to that of this client's last update, before one to whatever is live.
        A trainer that was killed and submits the same prompts again, under the same `name` and
        `rollout_id`, gets what is finished at once and waits only for the rest, which has the same weights
        or does not run. An id that is used again for anything else ends its earlier use.
        Raises `InvalidField` before anything is sent, `Unreachable` when the buffer takes nothing;
        what becomes of single prompts is for the returned rollout to say.
        """
        self._check_open()
        number = self._next_number if rollout_number is None else rollout_number
        sampling = sampling or SamplingParams()
        version = self.weight_version if weight_version is None else weight_version
        check_request(n, sampling, seed, number, version)
        if deadline_seconds is not None and not deadline_seconds > 0:
            raise InvalidField("deadline_seconds", deadline_seconds, "must be positive")
        prepared = prepare(prompts, self.tokenizer)
        rollout_id = secrets.token_hex(8) if rollout_id is None else check_rollout_id(rollout_id)
        if rollout_id in self._open:
            raise InvalidField("rollout_id", rollout_id, "is under way here; await it, or give another")
        self._next_submission += 1
        submission = self._next_submission
        rollout = Rollout(rollout_id, number, seed, n, sampling, prepared, submission, version, self._cancel)
        self._next_number = max(self._next_number, number + 1)
        now = asyncio.get_running_loop().time()
        self._heard = self._heard if self._open else now
        self._open.add(rollout, None if deadline_seconds is None else now + deadline_seconds)
        try:
            await self._send_prompts(rollout)
        except BaseException:
            self._open.expire(rollout, now)  # nobody will wait for it: the tending task cancels it
            raise
        finally:
            self._wake.set()
        return rollout

    async def update_weights(
        self,
        version: int,
        source: Source,
        *,
        digest: str = "",
        in_flight: InFlight = "finish",
        timeout_seconds: float = 3600.0,
    ) -> WeightsLive:
        """Bring every engine to other weights: a folder that all nodes see, or tensors by name.

        Tensors (a `state_dict()`, or numpy arrays) are sent to the buffer, or read from here by the
        engines (`MooncakeSource`); leave them as they are until this returns. Weights are checked
        everywhere before any engine loads them: on `WeightsRefused` nothing changed, and it names
        instance and reason. `in_flight`: what becomes of unfinished requests of any trainer. Later
        submissions of this client run with this version or not at all. Engines in `quarantined`
        failed to load and get no work. Raises `Unreachable` after `timeout_seconds`.
        """
        self._check_open()
        if self._update is not None:
            asked = self._update.asked.version
            raise InvalidField("version", version, f"await the update to version {asked} first")
        self._update = update = Update(version, source, digest, in_flight)
        try:
            async with asyncio.timeout(timeout_seconds):
                live = await update.run(self._channel.send)
        except TimeoutError as error:
            raise Unreachable(f"{self.endpoint}: no weights within {timeout_seconds:g} s") from error
        finally:
            self._update = None
        self.weight_version = version
        return live

    async def sleep(self, timeout_seconds: float = 600.0) -> None:
        """Have all engines free their KV memory (on GPUs weights go to host memory, too) until `wake`.

        What is unfinished is finished first; what is submitted, by any trainer, waits. Raises
        `SeerError` when another trainer, or a weight update, is in the way, `Unreachable` in time.
        """
        await self._rest(asleep=True, seconds=timeout_seconds)

    async def wake(self, timeout_seconds: float = 600.0) -> None:
        """Have all engines take their memory again, and work; see `sleep`."""
        await self._rest(asleep=False, seconds=timeout_seconds)

    async def _rest(self, *, asleep: bool, seconds: float) -> None:
        self._check_open()
        if self._resting is not None:
            raise SeerError("engines are being put to sleep or woken: await that first")
        answer: asyncio.Future[Slept] = asyncio.get_running_loop().create_future()
        self._resting = (Sleep(asleep=asleep, call_id=new_call_id()), answer)
        try:
            async with asyncio.timeout(seconds):
                await self._channel.send(self._resting[0])
                slept = await answer
        except TimeoutError as error:
            raise Unreachable(f"{self.endpoint}: not all engines answered within {seconds:g} s") from error
        finally:
            self._resting = None
        if slept.problem:
            raise SeerError(slept.problem)

    async def status(self, timeout_seconds: float = 10.0) -> Status:
        """Ask the buffer how it is. Raises `Unreachable` when no answer comes in time."""
        self._check_open()
        waiter: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._status_waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._channel.send(StatusRequest())
                return await waiter
        except TimeoutError as error:
            raise Unreachable(f"{self.endpoint} did not answer within {timeout_seconds:g} s") from error
        finally:
            self._status_waiters.remove(waiter)

    # --- the two tasks -------------------------------------------------------------------

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._tend())

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Whatever ended the connection ends the rollouts on it."""
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        cls = BufferLost if isinstance(error, SeerError) else RolloutFailed
        why = repr(error) if cls is RolloutFailed else str(error)
        self._open.fail(cls, why if error else "the client was closed")
        if self._update is not None:
            self._update.fail(Unreachable(f"{self.endpoint}: {why if error else 'the client was closed'}"))
        if self._resting is not None and not self._resting[1].done():
            ended = why if error else "the client was closed"
            self._resting[1].set_exception(Unreachable(f"{self.endpoint}: {ended}"))

    async def _receive(self) -> None:
        while True:
            message = await self._channel.recv()
            self._heard = asyncio.get_running_loop().time()
            match message:
                case Accepted() | GroupDone() | Progress() | Refused():
                    self._open.take(message)
                    if self._open.owes:
                        self._wake.set()
                case Status():
                    self._answer_status(message)
                case Welcome():
                    self._resubmit = True
                    self._wake.set()
                case WeightsLive() | WeightsFailed() | SpoolState() if self._update is not None:
                    self._update.answer(message)
                case Slept() if self._resting is not None:
                    asked, answer = self._resting
                    if message.asleep == asked.asleep and answers(asked, message) and not answer.done():
                        answer.set_result(message)
                case _:
                    pass

    def _answer_status(self, status: Status) -> None:
        for waiter in self._status_waiters:
            if not waiter.done():
                waiter.set_result(status)

    async def _tend(self) -> None:
        loop = asyncio.get_running_loop()
        ping = min(PING_SECONDS, self._silence_seconds / 4)
        pinged = 0.0
        while True:
            before = loop.time()
            try:
                async with asyncio.timeout_at(self._open.next_deadline(before + ping)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if loop.time() - before > 2 * ping:
                self._heard = loop.time()  # this loop stood still: the silence was not the buffer's
            await self._send_all(self._open.owed())
            await self._send_again()
            await self._send_all(self._open.expired(loop.time()))
            quiet = loop.time() - self._heard
            waiting = self._open or self._update or self._resting
            if self._open and quiet > self._silence_seconds:
                self._open.fail(BufferLost, f"{self.endpoint}: the buffer said nothing for {quiet:.0f} s")
            elif waiting and min(quiet, loop.time() - pinged) >= ping:
                pinged = loop.time()
                await self._channel.send(StatusRequest())

    async def _send_again(self) -> None:
        if not self._resubmit:
            return
        self._resubmit = False
        if self._update is not None:
            await self._update.ask_again(self._channel.send)
        if self._resting is not None:
            await self._channel.send(self._resting[0])
        if self._status_waiters:
            await self._channel.send(StatusRequest())
        for rollout in self._open:
            await self._send_prompts(rollout)

    # --- what they share -----------------------------------------------------------------

    async def _cancel(self, rollout: Rollout, prompt_ids: Sequence[str]) -> None:
        await self._send_all(self._open.cancel(rollout, prompt_ids))

    async def _send_prompts(self, rollout: Rollout) -> None:
        await self._send_all(submissions(rollout))

    async def _send_all(self, messages: Iterable[TrainerToBuffer]) -> None:
        for message in messages:
            await self._channel.send(message)

    def _check_open(self) -> None:
        if self._task is None or self._task.done():
            raise Unreachable(f"{self.endpoint}: the client is closed; open a new one")

    async def _close_sockets(self) -> None:
        self._channel.close()
        if self._given_transport is None:
            await self._transport.close()
