"""The synchronous face over real sockets: same results, same errors, no thread left."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from served_buffer import endpoint as endpoint

from seer.client import (
    Group,
    InvalidField,
    Prompt,
    RewardFailed,
    RolloutCancelled,
    RolloutClient,
    SyncDynamicSampling,
    SyncRolloutClient,
    SyncScores,
    Unreachable,
)


def test_plain_iteration(endpoint: str) -> None:
    with SyncRolloutClient(endpoint) as client:
        rollout = client.submit([[1, 2], [3, 4, 5]], n=1)
        assert [group.prompt_id for group in rollout] == ["1", "0"]
        assert [group.prompt_id for group in rollout.in_order()] == ["0", "1"]
        assert [group.responses[0].stop_reason for group in rollout.result()] == ["2", "2"]
        assert rollout.progress is not None
        assert rollout.progress.finished == 1
        assert client.submit([[1, 2]], n=1).rollout_number == 1
        assert client.status().policy == "divided"
    assert "seer-client" not in {thread.name for thread in threading.enumerate()}
    client.close()
    with pytest.raises(RuntimeError, match="with block"):
        client.status()


def test_a_close_that_fails_leaves_no_thread(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    close = RolloutClient.close

    async def failing(client: RolloutClient) -> None:
        await close(client)
        raise OSError("failed")

    with pytest.raises(OSError, match="failed"), SyncRolloutClient(endpoint):
        monkeypatch.setattr(RolloutClient, "close", failing)
    assert "seer-client" not in {thread.name for thread in threading.enumerate()}


def test_errors_come_through(endpoint: str) -> None:
    with SyncRolloutClient(endpoint) as client:
        rollout = client.submit([[1, 2], [3]], n=1)
        assert next(iter(rollout)).prompt_id == "0"
        rollout.cancel()
        with pytest.raises(RolloutCancelled) as info:
            rollout.result()
        assert info.value.prompt_ids == ("1",)
        assert rollout.failure is not None
        assert [group.prompt_id for group in rollout.groups] == ["0"]


def test_open_rollouts_come_through(endpoint: str) -> None:
    with SyncRolloutClient(endpoint) as client:
        rollout = client.open_rollout("mine")
        assert rollout.id == "mine"
        whole = rollout.submit([1, 2], n=2, group="/g", first_index=3)
        assert [each.token_ids.tolist() for each in whole.result().responses] == [[2], [2]]
        assert whole.ended
        [delta] = rollout.submit([1, 2], stream=True).tokens()
        assert (delta.index, delta.token_ids.tolist(), delta.logprobs.tolist()) == (0, [2], [-0.5])
        endless = rollout.submit(Prompt("endless", token_ids=[3]))
        assert not endless.ended
        endless.cancel()
        for ending in (endless.result, lambda: list(endless.tokens())):
            with pytest.raises(RolloutCancelled):
                ending()
        assert (rollout.counts.submitted, rollout.counts.finished, rollout.counts.failed) == (3, 2, 1)
        with pytest.raises(InvalidField, match="first_index = -1"):
            rollout.submit([1, 2], first_index=-1)
        rollout.close()
        with pytest.raises(InvalidField, match="closed"):
            rollout.submit([1, 2])


def test_work_runs_in_the_clients_thread(endpoint: str) -> None:
    async def status_there(client: RolloutClient) -> tuple[str, str]:
        return (await client.status()).policy, threading.current_thread().name

    async def fails(client: RolloutClient) -> None:
        raise RolloutCancelled("given up", ("1",))

    with SyncRolloutClient(endpoint) as client:
        assert client.run(status_there) == ("divided", "seer-client")
        with pytest.raises(RolloutCancelled, match="given up"):
            client.run(fails)


def test_rewards_come_through(endpoint: str) -> None:
    def reward(group: Group) -> list[float]:
        assert threading.current_thread() is not threading.main_thread()
        return [1.0 / (int(group.prompt_id) - 1)]

    with SyncRolloutClient(endpoint) as client:
        rollout = client.submit([[1, 2], [3, 4], [5, 6]], n=1)
        with SyncScores(rollout, reward) as scores:
            with pytest.raises(RewardFailed, match="ZeroDivisionError") as info:
                scores.result()
            assert info.value.prompt_ids == ("1",)
            assert [group.prompt_id for group in scores.unrewarded] == ["1"]
            assert sorted(scored.rewards for scored in scores.scored) == [(-1.0,), (1.0,)]
            assert scores.metrics.calls == 3
            assert scores.failure is not None
        with SyncScores(rollout, lambda group: [2.0]) as scores:
            assert [scored.rewards for scored in scores] == [(2.0,)] * 3
            assert [scored.group.prompt_id for scored in scores.in_order()] == ["0", "1", "2"]


def test_dynamic_sampling_comes_through(endpoint: str) -> None:
    def last_differs(group: Group) -> list[float]:
        return [float(int(group.prompt_id) % 2), 1.0]

    with SyncRolloutClient(endpoint) as client:
        client.submit([[1, 2]], n=1).result()
        prompts = ([1, 2 + i] for i in range(99))
        with SyncDynamicSampling(client, prompts, last_differs, target=3, oversample=1.0, n=2) as sampled:
            accepted = [scored.group.prompt_id for scored in sampled]
            assert [scored.group.prompt_id for scored in sampled.result()] == accepted == ["0", "2", "4"]
        assert sampled.complete
        assert sampled.failure is None
        assert sampled.rollout_number == 1
        assert len(sampled.accepted) == sampled.counts["accepted"] == 3
        assert sampled.counts["dropped"] == list(sampled.outcomes.values()).count("dropped") == 2
        assert sampled.unused == [[1, 2 + i] for i in range(5, len(sampled.outcomes))]


def test_nobody_there(tmp_path: Path) -> None:
    client = SyncRolloutClient(f"ipc://{tmp_path}/none", connect_seconds=0.1)
    with pytest.raises(Unreachable, match=f"ipc://{tmp_path}/none"):
        client.__enter__()
    assert "seer-client" not in {thread.name for thread in threading.enumerate()}
