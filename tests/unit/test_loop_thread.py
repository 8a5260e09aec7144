"""The classes without asyncio: nothing is left out, types and help are the asyncio classes', no call hangs."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from mypy import api

from seer.client import (
    DynamicSampling,
    PromptInFlight,
    RolloutClient,
    Scores,
    SyncDynamicSampling,
    SyncOpenRollout,
    SyncPromptInFlight,
    SyncRollout,
    SyncRolloutClient,
    SyncScores,
    loop_thread,
)
from seer.client.loop_thread import LoopThread
from seer.client.turns import SyncTrajectory, SyncTrajectoryRollout, Trajectory, TrajectoryRollout

ROOT = Path(__file__).parents[2]

USER = """
from collections.abc import Iterator
from typing import assert_type
from seer.client import *
from seer.client.turns import SyncTrajectory, SyncTrajectoryRollout, Turn

with SyncRolloutClient("ipc://x", name="me") as client:
    assert_type(client, SyncRolloutClient)
    rollout = client.submit([[1, 2]], n=2)
    assert_type(rollout, SyncRollout)
    assert_type(rollout.groups, list[Group])
    assert_type(rollout.in_order(), Iterator[Group])
    for each in rollout:
        assert_type(each, Group)
    assert_type(client.open_rollout("id").submit("text").result(), Group)
    assert_type(client.trajectories(["text"], max_context=3), SyncTrajectoryRollout)
    assert_type(client.status(3.0), Status)
    assert_type(SyncScores(rollout, lambda group: [1.0]).result(), list[Scored])

def agent(trajectory: SyncTrajectory) -> None:
    assert_type(trajectory.generate(max_tokens=3), Turn)
    assert_type(trajectory.room, int)

client.submit(3)  # type: ignore[arg-type]
client.submit([[1]], m=3)  # type: ignore[call-arg]
rollout.groups = []  # type: ignore[assignment]
SyncScores(client, lambda group: [1.0])  # type: ignore[arg-type]
SyncDynamicSampling(client, [[1]], lambda group: [1.0])  # type: ignore[call-arg]
"""


@pytest.mark.parametrize(
    ("face", "cls", "left_out"),
    [
        (SyncRolloutClient, RolloutClient, set()),
        (SyncPromptInFlight, PromptInFlight, {"answered_by", "fail", "finish", "generated"}),
        (SyncScores, Scores, set()),
        (SyncDynamicSampling, DynamicSampling, set()),
        (SyncTrajectory, Trajectory, {"end"}),
        (SyncTrajectoryRollout, TrajectoryRollout, set()),
    ],
)
def test_nothing_is_left_out(face: type, cls: type, left_out: set[str]) -> None:
    public = {name for name in vars(cls) if not name.startswith("_")}
    assert public - set(dir(face)) == left_out
    assert hasattr(face, "__iter__") == hasattr(cls, "__aiter__")
    assert hasattr(face, "__exit__") == hasattr(cls, "__aexit__")


def test_help_has_the_parameters_and_docstrings_of_the_asyncio_classes() -> None:
    for face, cls in ((SyncRolloutClient, RolloutClient), (SyncRolloutClient.submit, RolloutClient.submit)):
        assert list(inspect.signature(face).parameters) == list(inspect.signature(cls).parameters)
    for submit, returns in ((SyncRolloutClient.submit, "SyncRollout"), (RolloutClient.submit, "Rollout")):
        assert inspect.signature(submit).return_annotation == submit.__annotations__["return"] == returns
    assert inspect.signature(SyncRollout.in_order).return_annotation == "Iterator[Group]"
    assert list(inspect.signature(SyncScores).parameters)[:2] == ["rollout", "reward"]
    assert inspect.getdoc(SyncRolloutClient.submit) == inspect.getdoc(RolloutClient.submit)
    assert inspect.getdoc(SyncTrajectory.room) == inspect.getdoc(Trajectory.room)
    assert inspect.getdoc(SyncOpenRollout.id) == "The rollout's id at the buffer."


def test_mypy_knows_the_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "user.py").write_text(USER)
    said, _, status = api.run(["--strict", "--python-executable", sys.executable, str(tmp_path / "user.py")])
    assert status == 0, said


def test_an_interrupt_cancels_the_work() -> None:
    thread, ended = LoopThread().start(), threading.Event()

    async def work() -> None:
        await asyncio.sleep(0.1)  # the caller waits by now
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        thread.call(work())
    assert ended.wait(20)
    thread.stop()


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_stop_ends_what_other_threads_wait_for(monkeypatch: pytest.MonkeyPatch, stubborn: bool) -> None:
    monkeypatch.setattr(loop_thread, "END_SECONDS", 0.2)
    thread, began = LoopThread().start(), threading.Event()
    ends: list[BaseException] = []

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            if stubborn:
                await asyncio.sleep(3600)

    def wait() -> None:
        try:
            thread.call(work())
        except CancelledError as error:
            ends.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert began.wait(20)
    thread.stop()
    thread.stop()
    waiting.join(20)
    assert len(ends) == 1


def test_calls_that_no_loop_would_run_are_refused() -> None:
    thread = LoopThread()

    async def here() -> None:
        thread.call(asyncio.sleep(0))

    for _ in ("before", "after"):
        with pytest.raises(RuntimeError, match="inside its with block"):
            thread.call(asyncio.sleep(0))
        thread.start()
        with pytest.raises(RuntimeError, match="own thread"):
            thread.call(here())
        thread.stop()
