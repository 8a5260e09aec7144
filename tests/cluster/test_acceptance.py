"""What one engine learns of a group's drafts reaches the others with the group's next chunks."""

from cluster_harness import PROMPTS, running
from virtual_time import VIRTUAL, eventually

from seer.client import SamplingParams
from seer.common.policy.draft_costs import CELLS
from seer.services.engine.replay.backend import ReplayBackend

pytestmark = VIRTUAL

GOOD = "0#"
"""What follows the rollout's id in names of responses to the prompt whose drafts are accepted."""


async def test_a_new_engine_starts_a_group_with_what_others_learned_of_it(monkeypatch):
    known, step, add = {}, ReplayBackend.step, ReplayBackend.add

    def drafting(self):
        out = step(self)
        for end in out.ended:
            right = 36 if end.request_id.partition("/")[2].startswith(GOOD) else 1
            end.drafted, end.accepted = [40] * CELLS, [right] * CELLS
        return out

    def watched(self, chunk):
        known.setdefault(chunk.group_id, []).append(chunk.acceptance)
        add(self, chunk)

    monkeypatch.setattr(ReplayBackend, "step", drafting)
    monkeypatch.setattr(ReplayBackend, "add", watched)
    async with running(engines=1) as cluster, cluster.client() as client:
        rollout = await client.submit(PROMPTS[:2], n=2, sampling=SamplingParams(max_tokens=4000))
        context, buffer = (cluster.services[name].machine for name in ("context", "buffer"))
        await eventually(lambda: len(context.acceptance()) == 2)
        assert all(chunks[0] == () for chunks in known.values())
        await cluster.start("e1")
        await eventually(lambda: all(g.acceptance for g in buffer.groups.values()))
        rates = {group_id: group.acceptance for group_id, group in buffer.groups.items()}
        assert {min(each) > 60 for each in rates.values()} == {True, False}
        known.clear()
        await cluster.kill("e0")
        await eventually(lambda: len(known) == 2)
        for group_id, chunks in known.items():
            assert chunks[0] == tuple(rate / 100 for rate in rates[group_id])
        await rollout.result()
