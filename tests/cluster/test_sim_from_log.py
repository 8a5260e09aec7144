"""A rollout's log foretells how long the same rollout takes with another policy, more engines, other chunks."""

import pytest
from cluster_harness import running
from msgspec.structs import replace
from virtual_time import VIRTUAL

from seer.client import SamplingParams
from seer.common.config import BufferConfig, EngineConfig, ReplayConfig
from seer.sim.study import Task, Variant, perform
from seer.sim_command.from_log import read_run

pytestmark = VIRTUAL

REPLAY = ReplayConfig(step_seconds=0.02, row_seconds=0.002, mean_tokens=150)
ENGINE = EngineConfig(backend="replay", kv_blocks=60, max_num_seqs=16, replay=REPLAY)
PROMPTS = [[1 + number % 90] * (3 + number % 5) for number in range(48)]


async def run(folder, policy, engines, chunk_size):
    """Run a rollout; return what its log tells."""
    buffer = BufferConfig(policy=policy, chunk_size=chunk_size, log=str(folder))
    async with running(engines, engine=ENGINE, buffer=buffer) as cluster, cluster.client() as client:
        sampling = SamplingParams(max_tokens=600)
        rollout = await client.submit(PROMPTS, n=4, sampling=sampling, rollout_id="r", rollout_number=1)
        await rollout.result()
    return read_run(folder, "")


async def test_other_policies_more_engines_and_shorter_chunks_end_when_the_simulation_says(tmp_path):
    seer = await run(tmp_path / "seer", "seer", 2, 64)
    model = seer.load.model
    assert (model.step, model.request) == pytest.approx((REPLAY.step_seconds, REPLAY.row_seconds), rel=0.05)
    assert (model.prefill, model.attend) == pytest.approx((0, 0), abs=1e-5)
    assert perform(Task(seer.load, seer.variant, 0, 64)).total == pytest.approx(seer.total, rel=0.02)
    for policy, engines, chunk_size in (("static", 2, 64), ("divided", 2, 32), ("seer", 4, 64)):
        real = await run(tmp_path / f"{policy}{engines}", policy, engines, chunk_size)
        assert real.load.lengths == seer.load.lengths
        load = replace(seer.load, instances=engines)
        found = perform(Task(load, Variant(policy), 0, chunk_size)).total
        assert found == pytest.approx(real.total, rel=0.03)
