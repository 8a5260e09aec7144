"""A `verifiers` environment from end to end: tasks, harness, two turns, reward, token ids and logprobs."""

import asyncio
import sys
from pathlib import Path

import pytest

vf = pytest.importorskip("verifiers.v1")


@pytest.mark.parametrize("kind", ["train", "eval"])
async def test_an_environment(data, counters, model, kind):
    sys.path.insert(0, str(Path(__file__).parent))
    env = vf.load_environment(
        vf.SingleAgentEnvConfig(taskset={"id": "countdown_env"}, agent={"runtime": {"type": "subprocess"}})
    )
    config = (
        vf.TrainClientConfig(base_url=f"{data}/v1", api_key_var="NONE", renderer_model_name=model)
        if kind == "train"
        else vf.EvalClientConfig(base_url=f"{data}/v1", api_key_var="NONE")
    )
    ctx = vf.ModelContext(model="model", client=config, sampling=vf.SamplingConfig(max_tokens=6))
    before = counters()
    async with env.serving():
        slots = [slot for task in env.taskset for slot in env.slots(task, 2)]
        episodes = await asyncio.gather(*(env.run_slot(slot, ctx) for slot in slots))
    assert len(episodes) == 8
    # Of a first answer that ended by itself, the template leaves out the last token: that history is rewritten.
    after = counters()
    later, segments = (after[name] - before[name] for name in ("later_turns", "segments"))
    assert later + segments == len(episodes)
    assert later > 0
    for episode in episodes:
        assert episode.ok, episode.errors or [trace.errors for trace in episode.traces]
        (trace,) = episode.traces
        sampled = [node for node in trace.nodes if node.sampled]
        assert len(sampled) == 2
        if kind == "train":
            for node in sampled:
                assert 1 <= sum(node.mask) == len(node.logprobs) <= 6
