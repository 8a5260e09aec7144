"""Two processes of a trainer that shards its model, over torch.distributed, update a system of processes."""

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seer.client import RolloutClient
from seer.client.tensor_stream import TensorStream
from seer.common.config import load
from seer.local.system import LocalSystem

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)

TRAINER = Path(__file__).parents[1] / "sharded_trainer.py"
SETTINGS = ["engine.backend=replay", "engine.replay.step_seconds=0.001"]


def start(folder, endpoint, seconds=60):
    return [
        subprocess.Popen(
            [sys.executable, str(TRAINER), str(folder), str(rank), "2", endpoint, str(seconds)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


async def test_two_ranks_send_their_shards_and_both_hear_of_the_outcome(tmp_path):
    from sharded_trainer import whole

    async with LocalSystem(load(None, {}, SETTINGS), 1) as system:
        processes = start(tmp_path, system.endpoint)
        ended = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], ended
        expected = "".join(
            f"{version} {TensorStream(whole(version)).digest()} {version} {version > 1}\n"
            for version in (1, 2)
        )
        assert [out for out, _ in ended] == [expected, expected]
        async with RolloutClient(system.endpoint) as client:
            assert (await client.status()).weight_version == 2


@pytest.mark.parametrize("dies", [0, 1])
async def test_a_rank_whose_other_one_dies_ends_with_an_error(tmp_path, dies):
    async with LocalSystem(load(None, {}, SETTINGS), 1) as system:
        processes = start(tmp_path, system.endpoint, seconds=10)
        processes[dies].stdout.readline()  # its first update is live
        processes[dies].send_signal(signal.SIGKILL)
        processes[dies].communicate(timeout=60)
        _, error = processes[1 - dies].communicate(timeout=120)
        assert processes[1 - dies].returncode != 0, "or both were done"
        assert "Error" in error


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("of some", "3\n"),
        ("set up anew", "3\n"),
        ("that begin anew before they were told", "True\noutcome\n"),
    ],
)
def test_ranks_of_torch(tmp_path, case, expected):
    processes = [
        subprocess.Popen(
            [sys.executable, str(TRAINER.with_name("torch_ranks.py")), str(tmp_path), str(rank), case],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    ended = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in ended] == [expected] * 3, ended
