"""Requests, pauses and updates of a gateway process: the lists in `seer.gateway.open_requests` and `.control`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
import pytest
from virtual_time import VIRTUAL

from seer.client import BufferLost, Delta, Group, Response, RolloutFailed
from seer.common.config import BufferConfig, Config, GatewayConfig
from seer.common.errors import SeerError, WeightsRefused
from seer.common.types import Capacity, SamplingParams
from seer.common.wire import Status, WeightsLive
from seer.gateway.buffer_client import Outcome, Question, Sink
from seer.gateway.control import Control, obey
from seer.gateway.errors import HttpError
from seer.gateway.models import Models
from seer.gateway.open_requests import OpenRequests

pytestmark = VIRTUAL

SAMPLING = SamplingParams(max_tokens=10)
ASKS = Question(1, SAMPLING, 3)
DELTA = Delta(0, np.array([5], np.int32), np.zeros(1, np.float32))
CAPACITY = Capacity(kv_blocks=4, block_size=16, max_num_seqs=8, max_model_len=40)


def group(prompt_id: str, version: int) -> Group:
    tokens = np.array([5], np.int32)
    response = Response(0, tokens, np.zeros(1, np.float32), None, "stop", "")
    return Group(prompt_id, tokens, {}, version, "", (response,), 1, 0, 0)


class FakeBuffer:
    """Takes `seconds` for each submission, after a second for each of its `deltas`, by prompt.

    `end_all` does what a weight update does.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.version = 0
        self.asked: list[tuple[list[str], SamplingParams, int]] = []
        self.sessions: list[str | None] = []
        self.cancelled: list[str] = []
        self.error: SeerError | None = None
        self.there = True
        self.client = self
        self.updates: list[tuple[int, str, str]] = []
        self.update_seconds = 5.0
        self.cancel_seconds = 0.0
        self.refuse: dict[str, str] = {}
        self.deltas: dict[str, int] = {}
        self._ends = asyncio.Event()

    def capacities(self) -> list[Capacity]:
        if not self.there:
            raise HttpError(503, "away")
        return [CAPACITY]

    async def generate(
        self, prompts: Mapping[str, Sequence[int]], asks: Question, sink: Sink | None = None
    ) -> Outcome:
        self.asked.append((list(prompts), asks.sampling, asks.seed))
        self.sessions.append(asks.session)
        ends, version = self._ends, self.version
        try:
            for name in prompts:
                for _ in range(self.deltas.get(name, 0)):
                    await asyncio.sleep(1)
                    assert sink is not None
                    await sink(name, DELTA)
            async with asyncio.timeout(self.seconds):
                await ends.wait()
        except TimeoutError:
            if self.error is not None:
                raise self.error from None
            groups = {name: group(name, version) for name in prompts}
            for name in prompts if sink else ():
                await sink(name, groups[name])  # type: ignore[misc]
            return Outcome(groups)
        except asyncio.CancelledError:
            self.cancelled += prompts
            await asyncio.sleep(self.cancel_seconds)
            raise
        done = list(prompts)[:1] if len(prompts) > 1 else []  # the first of several had finished
        return Outcome({name: group(name, version) for name in done}, discarded=7)

    def end_all(self) -> None:
        self._ends.set()
        self._ends = asyncio.Event()

    async def fresh_status(self) -> Status:
        return Status(
            name="b", incarnation=1, policy="seer", instances=[], rollouts=0, requests_waiting=0,
            requests_running=0, weight_version=self.version,
        )  # fmt: skip

    async def update_weights(
        self, version: int, folder: str, *, in_flight: Literal["abort", "error"], timeout_seconds: float
    ) -> WeightsLive:
        self.updates.append((version, folder, in_flight))
        await asyncio.sleep(self.update_seconds)
        if self.refuse:
            raise WeightsRefused(version, self.refuse)
        self.version = version
        self.end_all()
        return WeightsLive(version=version, digest="d")


def desk_of(
    buffer: FakeBuffer, *, most: int = 8, seconds: float = 100.0, restart: bool = True
) -> OpenRequests:
    return OpenRequests(buffer, most=most, seconds=seconds, restart=restart)  # type: ignore[arg-type]


def ask(
    requests: OpenRequests, *names: str, prompt: Sequence[int] = (1, 2)
) -> asyncio.Task[dict[str, Group]]:
    prompts = dict.fromkeys(names or ("a",), prompt)
    return asyncio.create_task(requests.run(prompts, ASKS))


async def status_of(task: asyncio.Task[dict[str, Group]]) -> int:
    with pytest.raises(HttpError) as info:
        await task
    return info.value.status


async def test_the_buffer_is_told_of_sessions() -> None:
    buffer = FakeBuffer(seconds=1.0)
    requests = desk_of(buffer)
    for session in ("", "s"):
        await requests.run({"a": [1]}, Question(1, SAMPLING, 3, session))  # type: ignore[dict-item]
    await ask(requests)
    assert buffer.sessions == ["", "s", None]


async def test_max_tokens_is_lowered_to_what_fits() -> None:
    buffer = FakeBuffer()
    requests = desk_of(buffer)
    prompts = {"short": [1] * 5, "long": [1] * 35, "longer": [1] * 38}
    await requests.run(prompts, ASKS)
    limits = {name: sampling.max_tokens for names, sampling, _ in buffer.asked for name in names}
    assert limits == {"short": 10, "long": 5, "longer": 2}
    assert await status_of(ask(requests, prompt=[1] * 40)) == 400
    floor = SamplingParams(max_tokens=10, min_tokens=6)
    with pytest.raises(HttpError, match="min_tokens = 6: must not exceed"):
        await requests.run({"long": [1] * 35}, Question(1, floor, 0))


async def test_an_update_restarts_what_is_not_done_and_counts_what_was_thrown_away() -> None:
    buffer = FakeBuffer()
    requests = desk_of(buffer)
    task = ask(requests, "a", "b", "c")
    await asyncio.sleep(1)
    buffer.version = 1
    buffer.end_all()
    got = await task
    assert {name: each.weight_version for name, each in got.items()} == {"a": 0, "b": 1, "c": 1}
    assert [names for names, _, _ in buffer.asked] == [["a", "b", "c"], ["b", "c"]]
    assert (requests.counters["restarted"], requests.counters["discarded_tokens"]) == (2, 7)


async def test_a_pause_that_aborts_leaves_what_waited() -> None:
    buffer = FakeBuffer()
    requests = desk_of(buffer)
    requests.pause(abort=False)
    waiting = ask(requests, "waiting")
    await asyncio.sleep(1)
    requests.resume()
    await asyncio.sleep(1)
    requests.pause(abort=False)
    held = ask(requests, "held")
    await asyncio.sleep(1)
    requests.pause(abort=True)
    assert await status_of(waiting) == 503
    assert buffer.cancelled == ["waiting"]
    requests.resume()
    assert set(await held) == {"held"}


async def test_a_pause_right_after_a_resume_holds_what_waited() -> None:
    buffer = FakeBuffer()
    requests = desk_of(buffer)
    requests.pause(abort=False)
    task = ask(requests)
    await asyncio.sleep(1)
    requests.resume()
    requests.pause(abort=True)  # as both may come to a process at once
    await asyncio.sleep(5)
    assert not buffer.asked
    assert requests.under_way == 0
    requests.resume()
    assert (await task).keys() == {"a"}


async def test_a_pause_without_end_ends_with_the_request_s_deadline() -> None:
    buffer = FakeBuffer()
    requests = desk_of(buffer, seconds=30)
    requests.pause(abort=False)
    task = ask(requests)
    assert await status_of(task) == 503
    assert asyncio.get_running_loop().time() == 30
    assert requests.open_requests == 0


async def test_a_request_that_takes_too_long_is_cancelled() -> None:
    buffer = FakeBuffer(seconds=1000)
    task = ask(desk_of(buffer, seconds=30))
    assert await status_of(task) == 504
    assert buffer.cancelled == ["a"]


async def test_open_requests_are_bounded() -> None:
    requests = desk_of(FakeBuffer(), most=2)
    tasks = [ask(requests, str(i)) for i in range(3)]
    assert await status_of(tasks[2]) == 503
    assert [set(await task) for task in tasks[:2]] == [{"0"}, {"1"}]


async def test_errors_say_whether_to_come_again() -> None:
    buffer = FakeBuffer()
    requests = desk_of(buffer)
    for error, status in ((BufferLost("gone"), 503), (RolloutFailed("8 attempts"), 500)):
        buffer.error = error
        assert await status_of(ask(requests)) == status
    buffer.there = False
    assert await status_of(ask(requests)) == 503


async def test_a_gateway_that_stops_answers_what_waits() -> None:
    requests = desk_of(FakeBuffer())
    under_way = ask(requests, "under way")
    await asyncio.sleep(1)
    requests.pause(abort=False)
    held = ask(requests, "held")
    await asyncio.sleep(1)
    requests.close()
    assert await status_of(held) == 503
    assert asyncio.get_running_loop().time() == 2  # at once
    assert await status_of(ask(requests)) == 503
    assert set(await under_way) == {"under way"}


# --- streams ---------------------------------------------------------------------------------


def stream(requests: OpenRequests, *names: str) -> AsyncGenerator[tuple[str, Delta | Group]]:
    return requests.stream(dict.fromkeys(names or ("a",), (1, 2)), ASKS)


async def taken(events: AsyncGenerator[tuple[str, Delta | Group]]) -> list[str]:
    return [name if isinstance(what, Delta) else f"group {name}" async for name, what in events]


async def test_a_stream_has_tokens_as_they_come_and_then_groups() -> None:
    buffer = FakeBuffer()
    buffer.deltas = {"a": 2}
    events = stream(desk_of(buffer), "a", "b")
    assert (await anext(events))[1] is DELTA
    assert asyncio.get_running_loop().time() == 1
    assert await taken(events) == ["a", "group a", "group b"]


async def test_a_stream_that_sent_nothing_starts_again() -> None:
    buffer = FakeBuffer()
    requests = desk_of(buffer)
    task = asyncio.create_task(taken(stream(requests)))
    await asyncio.sleep(5)
    buffer.version = 1
    buffer.end_all()
    assert await task == ["group a"]
    assert (requests.counters["restarted"], requests.counters["interrupted_streams"]) == (1, 0)


async def test_a_stream_that_sent_tokens_ends_in_an_error_and_is_counted() -> None:
    buffer = FakeBuffer()
    buffer.deltas = {"a": 1}
    requests = desk_of(buffer)
    events = stream(requests)
    await anext(events)
    requests.pause(abort=False)
    buffer.end_all()
    with pytest.raises(HttpError, match="what was sent is of the weights before") as info:
        await anext(events)
    assert info.value.status == 503
    assert (requests.counters["restarted"], requests.counters["interrupted_streams"]) == (0, 1)
    assert requests.counters["discarded_tokens"] == 7
    assert requests.open_requests == 0


async def test_a_finished_prompt_of_a_stream_does_not_keep_others_from_starting_again() -> None:
    buffer = FakeBuffer()
    buffer.deltas = {"a": 1}
    requests = desk_of(buffer)
    events = stream(requests, "a", "b")  # the fake's first prompt has finished when an update ends the rest
    await anext(events)
    requests.counters.clear()
    buffer.end_all()
    assert await taken(events) == ["group b"]
    assert requests.counters["restarted"] == 1


async def test_a_stream_that_is_not_read_waits_and_one_that_is_closed_is_cancelled() -> None:
    buffer = FakeBuffer()
    buffer.deltas = {"a": 100}
    requests = desk_of(buffer, seconds=1000)
    events = stream(requests)
    await anext(events)
    await asyncio.sleep(500)
    assert buffer.cancelled == []
    assert requests.under_way == 1  # it waits with two tokens more: one is handed over, one is being so
    await events.aclose()
    assert buffer.cancelled == ["a"]
    assert (requests.open_requests, requests.under_way) == (0, 0)


async def test_who_is_aborted_twice_hears_it_once() -> None:
    """As by a pause and then by sleep, while the buffer is still told of the first."""
    buffer = FakeBuffer()
    buffer.cancel_seconds = 2.0
    requests = desk_of(buffer)
    whole, streamed = ask(requests), asyncio.create_task(taken(stream(requests)))
    await asyncio.sleep(1)
    requests.pause(abort=True)
    await asyncio.sleep(1)
    requests.abort()
    for task in (whole, streamed):
        with pytest.raises(HttpError, match="mode=abort"):
            await task


async def test_a_stream_is_refused_before_its_first_event() -> None:
    buffer = FakeBuffer()
    requests = desk_of(buffer, most=1)
    first = asyncio.create_task(taken(stream(requests)))
    await asyncio.sleep(1)
    with pytest.raises(HttpError, match="come again"):
        await anext(stream(requests))
    await first


# --- control ---------------------------------------------------------------------------------


def control_of(
    buffer: FakeBuffer, *desks: OpenRequests, seconds: float = 3600.0, **settings: object
) -> Control:
    config = Config(gateway=GatewayConfig(**settings), buffer=BufferConfig(update_seconds=seconds))  # type: ignore[arg-type]
    models = Models("/m/base", "", buffer)  # type: ignore[arg-type]
    return Control(config, buffer, [partial(obey, requests, models) for requests in desks])  # type: ignore[arg-type]


async def test_a_pause_can_wait_for_what_is_under_way_but_not_for_ever() -> None:
    buffer = FakeBuffer()
    requests = desk_of(buffer)
    control = control_of(buffer, requests, seconds=50.0)
    task = ask(requests)
    await asyncio.sleep(1)
    await control.pause("wait")
    assert task.done() or requests.under_way == 0
    await control.resume()
    buffer.seconds = 90.0
    await task
    later = ask(requests)
    await asyncio.sleep(1)
    with pytest.raises(HttpError, match="still under way after 50 s") as info:
        await control.pause("wait")
    assert info.value.status == 504
    assert control.paused
    await later


async def test_an_update_while_paused_waits_for_nothing() -> None:
    buffer = FakeBuffer(seconds=1000)
    requests = desk_of(buffer, seconds=5000)
    control = control_of(buffer, requests)
    task = ask(requests)
    await asyncio.sleep(1)
    await control.pause("keep")
    held = ask(requests, "held")
    assert await control.update("/w/1", "weight_dir") == "1"
    assert asyncio.get_running_loop().time() == 6
    assert requests.under_way == 0
    await control.resume()
    versions = [each.weight_version for got in await asyncio.gather(task, held) for each in got.values()]
    assert versions == [1, 1]
    assert buffer.updates == [(1, "/w/1", "abort")]


async def test_updates_do_not_overlap() -> None:
    buffer = FakeBuffer()
    control = control_of(buffer, desk_of(buffer))
    first = asyncio.create_task(control.update("/w/1", "weight_dir"))
    await asyncio.sleep(1)
    with pytest.raises(HttpError, match="another weight update") as info:
        await control.update("/w/2", "weight_dir")
    assert info.value.status == 409
    assert await first == "1"
    assert await control.update("/w/2", "weight_dir") == "2"
    assert [folder for _, folder, _ in buffer.updates] == ["/w/1", "/w/2"]


async def test_an_update_goes_on_when_its_asker_leaves() -> None:
    buffer = FakeBuffer()
    control = control_of(buffer, desk_of(buffer))
    asker = asyncio.create_task(control.update("/w/1", "weight_dir"))
    await asyncio.sleep(1)
    asker.cancel()
    await asyncio.sleep(10)
    assert buffer.version == 1
    assert await control.update("/w/2", "weight_dir") == "2"


async def test_an_update_may_be_refused_while_requests_are_under_way() -> None:
    buffer = FakeBuffer()
    requests = desk_of(buffer)
    control = control_of(buffer, requests, on_update="refuse")
    task = ask(requests)
    await asyncio.sleep(1)
    with pytest.raises(HttpError, match="1 requests are under way") as info:
        await control.update("/w/1", "weight_dir")
    assert info.value.status == 409
    assert buffer.updates == []
    await task
    assert await control.update("/w/1", "weight_dir") == "1"
    assert buffer.updates == [(1, "/w/1", "error")]


async def test_weights_that_are_refused_name_the_field() -> None:
    buffer = FakeBuffer()
    buffer.refuse = {"engine-0": "no such folder"}
    control = control_of(buffer, desk_of(buffer))
    with pytest.raises(HttpError, match=r"model_path = '/w': .*engine-0: no such folder") as info:
        await control.update("/w", "model_path")
    assert (info.value.status, info.value.param) == (400, "model_path")
    with pytest.raises(HttpError, match="give an absolute path"):
        await control.update("w", "weight_dir")
