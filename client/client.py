"""The asyncio client of a buffer: one connection, any number of rollouts.

Invariants:
- one task receives and never sends, another sends what received messages require: neither can block the
  other, nor the buffer;
- when the buffer was restarted, or lost a message, every unfinished prompt is submitted again, under the
  same rollout id: noise keys are the same, so the tokens are too;
- groups that arrive are acknowledged, and work that was given up is cancelled (`active_rollouts.py`);
- nothing waits for ever: a rollout ends with its results, its deadline or the buffer's silence.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self, get_args

import numpy.typing as npt

from seer.client.active_rollouts import ActiveRollouts, AnyRollout
from seer.client.calls import Calls, answered_within
from seer.client.image_uploads import ImageUploads
from seer.client.mismatch import mismatch_of
from seer.client.next_prompts import NamesNextPrompts
from seer.client.open_rollout import OpenRollout
from seer.client.prompts import Prompt, check_request, check_rollout_id, prepare, version_of
from seer.client.results import Response
from seer.client.rollout import BufferLost, Rollout, submissions
from seer.client.sent_weights import SentWeights, sent_weights
from seer.client.sharded_update import update_of
from seer.client.text import Tokenizer, load_tokenizer
from seer.client.turns.rollout import TrajectoriesAsked, TrajectoryRollout, begun
from seer.client.used_noise import UsedNoise
from seer.client.weight_update import InFlight, Source, Update, new_call_id
from seer.common.bounds import INT64, check_seconds, check_whole
from seer.common.clock import LoopClock
from seer.common.config import SecurityConfig
from seer.common.errors import InvalidField, RolloutFailed, SeerError, Unreachable
from seer.common.ids import new_incarnation
from seer.common.net.channel import Channel
from seer.common.net.identity import Identity
from seer.common.net.keys import load_keys, new_name, security_of
from seer.common.net.transport.base import Transport
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.sleep import SleepLevel, SleepTag
from seer.common.types import SamplingParams
from seer.common.wire import (
    Accepted,
    BufferToTrainer,
    Goodbye,
    GroupDone,
    ImageState,
    Mismatch,
    Progress,
    Refused,
    ReportMismatch,
    Sleep,
    Slept,
    SpoolState,
    Status,
    StatusRequest,
    Submit,
    Tokens,
    TokensGenerated,
    TrainerToBuffer,
    WeightsFailed,
    WeightsLive,
    WeightsLoading,
    Welcome,
)

PING_SECONDS = 5.0
"""A buffer that sends nothing for this long, as it may have nothing to say, is asked for its status."""

GOODBYE_SECONDS = 2.0
"""Longest time that `close` takes when the buffer is gone."""


class RolloutClient(NamesNextPrompts):
    """Use as `async with RolloutClient(endpoint) as client`; one event loop, any task.

    `tokenizer` (a model folder, a tokenizer.json, or an object with encode and decode) is needed for text
    only. Rollouts fail with `BufferLost` when the buffer sends nothing for `silence_seconds`; if it drained,
    those with a deadline wait until then for its successor. Entering raises `Unreachable` after
    `connect_seconds`. `security`: default, SEER_SECURITY__*. `deltas` False: no deltas; or another client's.
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
        security: SecurityConfig | None = None,
        deltas: SentWeights | bool = True,
    ) -> None:
        super().__init__()
        self.endpoint, self.deltas = endpoint, sent_weights(deltas)
        self._keys = load_keys(security_of(os.environ) if security is None else security)
        self.name = name or new_name(self._keys)
        self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        self._connect_seconds = check_seconds("connect_seconds", connect_seconds)
        self._silence_seconds = check_seconds("silence_seconds", silence_seconds)
        self._given_transport = transport
        self._task: asyncio.Task[None] | None = None
        self._next_submission, self._version_found, self.weight_version = 0, -1, -1
        self._noise = UsedNoise()
        self._active = ActiveRollouts(self.tokenizer)
        self._uploads = ImageUploads(lambda *lost: self._send_all(self._active.lose_image(*lost)))
        self._resubmit, self._last_heard = False, 0.0
        self._wake = asyncio.Event()
        self._statuses: Calls[Status] = Calls()
        self._slept: Calls[Slept] = Calls()
        self._update: Update | None = None
        self._sleep: Sleep | None = None
        self._wish: Sleep | None = None

    async def __aenter__(self) -> Self:
        self._transport = self._given_transport or ZmqTransport(keys=self._keys)
        incarnation = new_incarnation()
        self._next_submission = incarnation >> 1  # leaves room to count up
        me = Identity(role="trainer", name=self.name, incarnation=incarnation)
        self._channel: Channel[TrainerToBuffer, BufferToTrainer] = Channel(
            self._transport, self.endpoint, me, BufferToTrainer, LoopClock()
        )
        try:
            self._version_found = (await self._channel.open(self._connect_seconds)).weight_version
        except BaseException:
            await self._close_sockets()
            raise
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._on_end)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is unfinished and leave; idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                for rollout in self._active:
                    await self._cancel(rollout, ())
                await self._send_all(self._active.owed())
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
        repeat: bool = False,
        deadline_seconds: float | None = None,
        rollout_id: str | None = None,
        weight_version: int | None = None,
        expect_weights: int | None = None,
    ) -> Rollout:
        """Submit prompts for n responses each; prompts without an id get their position as id.

        `rollout_number` is part of the noise key: a trainer that may be started again gives its step. The
        default is above all before it, and follows from the weight version (`seer.client.used_noise`). Noise
        that this client has used is refused, except with `repeat`.
        `weight_version` is waited for; it defaults to that of this client's last update, before the first to
        the live one. `expect_weights` is the version that must be live now, and still be when the prompts
        begin: else they fail within ten seconds, or as the weights change, with an error that names this
        version, the live one and the trainer that made that live. No prompt gets other weights.
        A trainer that was killed may submit the same prompts again, under the same `name` and `rollout_id`:
        it gets finished groups at once, and the others with the same weights, or an error. Other content
        under an id that is in use ends the earlier submission. Raises `InvalidField` before anything is
        sent, `Unreachable` when the buffer reads nothing; errors of single prompts are raised by the
        `Rollout`.
        """
        self._check_open()
        sampling = sampling or SamplingParams()
        version = version_of(weight_version, expect_weights, self.weight_version)
        number = self._number(rollout_number, version)
        check_request(n, sampling, seed, number, version)
        check_seconds("deadline_seconds", deadline_seconds)
        prepared = prepare(prompts, self.tokenizer)
        rollout_id = self._free_id(rollout_id)
        claims = self._noise.claim_prompts(seed, number, n, list(prepared.values()), repeat=repeat)
        rollout = Rollout(
            rollout_id, number, seed, n, sampling, prepared, self._new_submission(), version, self._cancel,
            claims, expect_weights is not None,
        )  # fmt: skip
        self._noise.took(number)
        now = asyncio.get_running_loop().time()
        self._last_heard = self._last_heard if self._active else now
        self._active.add(rollout, None if deadline_seconds is None else now + deadline_seconds)
        try:
            await self._send_prompts(rollout)
        except BaseException:
            self._active.expire(rollout, now)  # nobody will wait for it: `_send_due` cancels it
            raise
        finally:
            self._wake.set()
        return rollout

    def open_rollout(
        self,
        rollout_id: str | None = None,
        *,
        rollout_number: int | None = None,
        repeat: bool = False,
        expect_weights: int | None = None,
    ) -> OpenRollout:
        """Return a rollout that takes prompts as they come, each with its own parameters, until it is closed.

        Each prompt is generated by the weights that are live when it begins. `rollout_number` is that of all
        prompts that name no other, and with `repeat` and `expect_weights`, of all prompts, as in `submit`:
        open a rollout for each step. Raises `InvalidField`.
        """
        self._check_open()
        number = self._number(rollout_number, version_of(None, expect_weights, self.weight_version))
        check_request(1, SamplingParams(), 0, number)
        rollout = OpenRollout(
            self._free_id(rollout_id), self._new_submission, self.tokenizer,
            lambda: version_of(None, expect_weights, self.weight_version), self._wake_sender, self._cancel,
            self._active.settle, self._noise, number, repeat=repeat, expects=expect_weights is not None,
        )  # fmt: skip
        self._noise.took(number)
        self._active.add(rollout, None)
        return rollout

    def trajectories(
        self,
        prompts: Iterable[Prompt | str | Sequence[int] | Tokens],
        *,
        n: int = 8,
        sampling: SamplingParams | None = None,
        max_context: int,
        idle_seconds: float = 600.0,
        max_open: int = 256,
        journal: str | Path | None = None,
        seed: int = 0,
        rollout_number: int | None = None,
        repeat: bool = False,
        rollout_id: str | None = None,
        weight_version: int | None = None,
        expect_weights: int | None = None,
    ) -> TrajectoryRollout:
        """Return a rollout of n trajectories of many turns for each prompt; `run(agent)` runs them.

        A trajectory has at most `max_context` tokens, prompt included. Updates of weights wait for a
        trajectory's next turn up to `idle_seconds`, then go ahead, and a later turn fails. At most
        `max_open` agents are under way. `journal`: a file that keeps what environments said, for a trainer
        that is started again. The other parameters are those of `submit`. Raises `InvalidField` before
        anything is sent.
        """
        version = version_of(weight_version, expect_weights, self.weight_version)
        number = self._number(rollout_number, version)
        asked = TrajectoriesAsked(
            prepare(prompts, self.tokenizer), n, sampling or SamplingParams(), seed, number, version,
            max_context, idle_seconds, max_open,
        )  # fmt: skip
        return begun(asked, journal, self.tokenizer, lambda again: self.open_rollout(
            rollout_id, rollout_number=number, repeat=repeat or again, expect_weights=expect_weights
        ))  # fmt: skip

    def _number(self, given: int | None, version: int) -> int:
        """Return a rollout's number: what was given, or one of the version, by default that found here."""
        check_whole("weight_version", version, -1, INT64[1])
        return self._noise.number(given, self._version_found if version < 0 else version)

    def _free_id(self, rollout_id: str | None) -> str:
        """Return the id of a new rollout. Raises `InvalidField` for one that cannot be used."""
        rollout_id = secrets.token_hex(8) if rollout_id is None else check_rollout_id(rollout_id)
        if rollout_id in self._active:
            raise InvalidField("rollout_id", rollout_id, "is under way here; await it, or give another")
        return rollout_id

    def _new_submission(self) -> int:
        self._next_submission += 1
        return self._next_submission

    def _wake_sender(self) -> None:
        self._check_open()
        if not self._active:
            self._last_heard = asyncio.get_running_loop().time()
        self._wake.set()

    async def update_weights(
        self,
        version: int,
        source: Source,
        *,
        digest: str = "",
        in_flight: InFlight = "finish",
        timeout_seconds: float = 3600.0,
        base: int | None = None,
    ) -> WeightsLive:
        """Have every engine load new weights: from a folder that all nodes can read, or tensors by name.

        Tensors (a `state_dict()`, or numpy arrays; `ShardedTensors`: each rank sends its share) are sent to
        the buffer, or read from here by engines (`MooncakeSource`); do not change them until this returns.
        Where they differ little from those sent last, only what differs is sent (`docs/weights.md`); `base`,
        their version, wants that at any share. Engines merge a `LoraAdapter` into the model of their start.
        They check all weights before any loads: after `WeightsRefused`, with reasons by instance, nothing has
        changed. `SharedTensors` and `Broadcast` overwrite live weights; names, types, shapes are checked.
        `in_flight`: unfinished requests, of all trainers, `finish`, are aborted (`abort`), or prevent the
        update (`error`). Later submissions of this client run with this version or fail. Engines in
        `quarantined` could not load and get no work. Raises `Unreachable` after `timeout_seconds`.
        """
        self._check_open()
        if (current := self._update) is not None:
            raise InvalidField("version", version, f"await the update to {current.request.version} first")
        self._update = update = update_of(version, source, digest, in_flight, self.deltas, base)
        try:
            async with answered_within(timeout_seconds, f"{self.endpoint}: no weights"):
                live = await update.run(self._channel.send, self._channel.digests)
        finally:
            self._update = None
        self.weight_version = version
        return live

    async def sleep(self, timeout_seconds: float = 600.0, *, level: SleepLevel = 1) -> None:
        """Have all engines free their memory until `wake`.

        At `level` 1 they free the KV cache, and on GPUs weights move to host memory. At level 2 they drop
        their weights, too. Unfinished requests are finished first; new submissions, of any trainer, wait.
        Raises `InvalidField`, `SeerError` when another trainer or an update prevents it, `Unreachable` after
        `timeout_seconds`.
        """
        check_whole("level", level, 1, 2)
        await self._call_sleep(Sleep(asleep=True, call_id=new_call_id(), level=level), timeout_seconds)

    async def wake(self, timeout_seconds: float = 600.0, *, tags: Sequence[SleepTag] | None = None) -> None:
        """Have all engines take their memory again and go on; see `sleep`.

        `tags=["weights"]` wakes the weights alone, so that they can be updated before `tags=["kv_cache"]`
        wakes the rest. Engines that dropped their weights, and that no update gave any, load the live ones
        again before they get work.
        """
        if tags is not None and not (tags and set(tags) <= set(get_args(SleepTag))):
            raise InvalidField("tags", tags, "give None for all, or weights, kv_cache or both")
        wake = Sleep(asleep=False, call_id=new_call_id(), tags=sorted(set(tags or ())))
        await self._call_sleep(wake, timeout_seconds)

    async def _call_sleep(self, request: Sleep, seconds: float) -> None:
        self._check_open()
        if self._sleep is not None:
            raise SeerError("another sleep or wake of this client is not finished: await it first")
        self._sleep = request
        try:
            async with answered_within(seconds, f"{self.endpoint}: not all engines answered"):
                slept = await self._slept.ask(request.call_id, self._channel.send(request))
        finally:
            self._sleep = None
        if slept.problem:
            raise SeerError(slept.problem)
        self._wish = Sleep(asleep=bool(slept.tags), level=request.level, tags=slept.tags, wish=slept.wish)

    async def status(self, timeout_seconds: float = 10.0) -> Status:
        """Return the buffer's state. Raises `Unreachable` without an answer in time, or a connection."""
        self._check_open()
        async with answered_within(timeout_seconds, f"{self.endpoint} did not answer"):
            return await self._statuses.ask(StatusRequest, self._channel.send(StatusRequest()))

    async def report_mismatch(
        self, responses: Sequence[Response], logprobs: Sequence[npt.ArrayLike]
    ) -> Mismatch:
        """Tell the system how far a trainer's logprobs are off the engines', for metrics; return the figures.

        `logprobs` are the trainer's, by the weights that generated: for each response one value a token, NaN
        for those that the trainer left out. Raises `InvalidField`.
        """
        self._check_open()
        found = mismatch_of(responses, logprobs, self.weight_version)
        await self._channel.send(ReportMismatch(mismatch=found))
        return found

    # --- the two tasks -------------------------------------------------------------------

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._send_due())
            tasks.create_task(self._uploads.run(self._channel.send))

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """End all rollouts and calls with the error that ended the connection."""
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        cls = BufferLost if isinstance(error, SeerError) else RolloutFailed
        why = repr(error) if cls is RolloutFailed else str(error)
        ended = why if error else "the client was closed"
        self._active.fail(cls, ended)
        for calls in (self._update, self._slept, self._statuses, self._answers):
            if calls is not None:
                calls.fail(Unreachable(f"{self.endpoint}: {ended}"))

    async def _receive(self) -> None:
        while True:
            message = await self._channel.recv()
            self._last_heard = asyncio.get_running_loop().time()
            match message:
                case Accepted() | GroupDone() | TokensGenerated() | Progress() | Refused():
                    self._active.take(message)
                    if self._active.owes:
                        self._wake.set()
                    if isinstance(message, Accepted | Refused):
                        self._answers.answer(message.submission, message)
                case Status():
                    self._statuses.answer(StatusRequest, message)
                case Welcome():
                    self._resubmit = True
                    self._wake.set()
                case WeightsLive() | WeightsFailed() | WeightsLoading() | SpoolState() if (
                    self._update is not None
                ):
                    self._update.answer(message)
                case Slept():
                    self._slept.answer(message.call_id, message)
                case ImageState():
                    self._uploads.answer(message)

    async def _send_due(self) -> None:
        loop = asyncio.get_running_loop()
        ping, pinged = min(PING_SECONDS, self._silence_seconds / 4), 0.0
        while True:
            before = loop.time()
            try:
                async with asyncio.timeout_at(self._active.next_deadline(before + ping)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if loop.time() - before > 2 * ping:
                self._last_heard = loop.time()  # this loop was blocked: the buffer was not silent
            await self._send_all(self._active.owed())
            await self._send_again()
            for rollout in self._active.open:
                await self._send_all(rollout.to_submit())
                self._active.settle(rollout)
            await self._send_all(self._active.expired(loop.time()))
            quiet = loop.time() - self._last_heard
            waiting = self._active or self._update or self._sleep
            if self._active and quiet > self._silence_seconds:
                self._active.lose(BufferLost, f"{self.endpoint}: the buffer sent nothing for {quiet:.0f} s")
            elif waiting and min(quiet, loop.time() - pinged) >= ping:
                pinged = loop.time()
                await self._channel.send(StatusRequest())

    async def _send_again(self) -> None:
        if not self._resubmit:
            return
        self._resubmit = False
        if self._wish is not None:
            await self._channel.send(self._wish)
        if self._update is not None:
            await self._update.send_again(self._channel.send)
        if self._sleep is not None:
            await self._channel.send(self._sleep)
        if self._statuses:
            await self._channel.send(StatusRequest())
        for rollout in self._active:
            await self._send_prompts(rollout)

    # --- sending -------------------------------------------------------------------------

    async def _cancel(self, rollout: AnyRollout, prompt_ids: Sequence[str]) -> None:
        await self._send_all(self._active.cancel(rollout, prompt_ids))

    async def _send_prompts(self, rollout: AnyRollout) -> None:
        again = submissions(rollout) if isinstance(rollout, Rollout) else rollout.to_submit(again=True)
        await self._send_all(again)

    async def _send_all(self, messages: Iterable[TrainerToBuffer]) -> None:
        for message in messages:
            await self._channel.send(message)
            if isinstance(message, Submit) and message.images:  # the buffer knows by now who needs them
                self._uploads.add(self._active.images_of(message))

    def _check_open(self) -> None:
        if self._task is None or self._task.done():
            raise Unreachable(f"{self.endpoint}: the client is closed; open a new one")

    async def _close_sockets(self) -> None:
        self._channel.close()
        if self._given_transport is None:
            await self._transport.close()
