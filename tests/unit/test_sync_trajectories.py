"""Agents that are plain functions: in their own threads, with what `Trajectory` has, and never left behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

from served_buffer import endpoint as endpoint  # it answers each turn with a 2

from seer.client import RolloutCancelled, SyncRolloutClient
from seer.client.turns import SyncTrajectory, SyncTrajectoryRollout, TrajectoryFailed

ASKED = {"n": 3, "max_context": 20}


def threads() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith("agent ")}


def consume(rollout: SyncTrajectoryRollout, agent: Callable[[SyncTrajectory], object]) -> None:
    """Run agents in another thread, which ends when the rollout is left."""

    def run() -> None:
        with contextlib.suppress(CancelledError):
            list(rollout.run(agent))

    threading.Thread(target=run, daemon=True).start()


def test_agents_run_in_threads_of_their_own(endpoint: str) -> None:
    seen: set[str] = set()

    def agent(trajectory: SyncTrajectory) -> int:
        turn = trajectory.generate(max_tokens=3)
        assert trajectory.once(lambda call_id: threading.current_thread().name) in threads()
        seen.add(threading.current_thread().name)
        assert turn.token_ids.tolist() == [2]
        trajectory.append([7, 8])
        trajectory.generate()
        assert trajectory.context.tolist() == [*trajectory.prompt_token_ids.tolist(), 2, 7, 8, 2]
        assert len(trajectory.turns) == 2
        return trajectory.index

    with SyncRolloutClient(endpoint) as client:
        with client.trajectories([[1, 2], [3, 4, 5]], **ASKED) as rollout:  # type: ignore[arg-type]
            groups = list(rollout.run(agent))
        assert {group.prompt_id for group in groups} == {"0", "1"}
        for group in groups:
            assert [each.result for each in group.trajectories] == [0, 1, 2]  # type: ignore[union-attr]
            for each in group.trajectories:
                assert each.loss_mask.tolist() == [True, False, False, True]  # type: ignore[union-attr]
    assert seen == {f"agent {prompt}/{index}" for prompt in "01" for index in range(3)}
    assert not threads()


def test_one_agent_s_error_is_its_own_trajectory_s(endpoint: str) -> None:
    def agent(trajectory: SyncTrajectory) -> None:
        trajectory.generate()
        if trajectory.index == 1:
            trajectory.once(lambda call_id: 1 // 0)

    with SyncRolloutClient(endpoint) as client, client.trajectories([[1, 2]], **ASKED) as rollout:  # type: ignore[arg-type]
        ((one, failed, two),) = [group.trajectories for group in rollout.run(agent)]
    assert isinstance(failed, TrajectoryFailed)
    assert isinstance(failed.__cause__, ZeroDivisionError)
    assert not isinstance(one, TrajectoryFailed)
    assert not isinstance(two, TrajectoryFailed)


def test_an_agent_may_go_on_after_an_error_of_its_environment(endpoint: str) -> None:
    def agent(trajectory: SyncTrajectory) -> object:
        for _ in range(50):
            with contextlib.suppress(ZeroDivisionError):
                trajectory.once(lambda call_id: 1 // 0)
            trajectory.append([7])
        return trajectory.once(lambda call_id: call_id)

    asked = {"n": 3, "max_context": 99}
    with SyncRolloutClient(endpoint) as client, client.trajectories([[1, 2]], **asked) as rollout:  # type: ignore[arg-type]
        (group,) = rollout.run(agent)
    assert [each.result[-4:] for each in group.trajectories] == ["/0/0", "/1/0", "/2/0"]  # type: ignore[union-attr]


def test_who_leaves_ends_agents_and_waits_for_those_at_work(endpoint: str) -> None:
    at_work, go_on = threading.Barrier(4), threading.Event()
    ends: list[str] = []

    def environment(call_id: str) -> str:
        at_work.wait(20)
        go_on.wait(20)
        return call_id

    def agent(trajectory: SyncTrajectory) -> None:
        trajectory.generate()
        try:
            environment("") if trajectory.index else trajectory.once(environment)
            trajectory.generate()
        except RolloutCancelled as error:
            ends.append(str(error))
            raise

    with SyncRolloutClient(endpoint) as client, client.trajectories([[1, 2]], **ASKED) as rollout:  # type: ignore[arg-type]
        consume(rollout, agent)
        at_work.wait(20)
        leaving = threading.Timer(0.2, go_on.set)
        leaving.start()
    assert len(ends) == 3
    assert "left" in ends[0]
    assert not threads()


def test_a_turn_under_way_is_cancelled_when_the_rollout_is_left(endpoint: str) -> None:
    began = threading.Event()
    ends: list[type[BaseException]] = []

    def agent(trajectory: SyncTrajectory) -> None:
        began.set()
        try:
            trajectory.generate()  # this buffer never answers prompts of one token
        except RolloutCancelled as error:
            ends.append(type(error))
            raise

    with SyncRolloutClient(endpoint) as client, client.trajectories([[1]], n=1, max_context=9) as rollout:
        consume(rollout, agent)
        assert began.wait(20)
    assert ends == [RolloutCancelled]
