"""What one engine learns of drafts reaches the others, and a new engine before its first chunk runs."""

from cluster_harness import PROMPTS, running
from virtual_time import eventually, virtual

from seer.client import SamplingParams
from seer.common.policy.draft_costs import ALL_GROUPS, CELLS
from seer.services.engine.replay.backend import ReplayBackend


@virtual
async def test_a_new_engine_starts_with_what_others_learned(monkeypatch):
    known, step, add = [], ReplayBackend.step, ReplayBackend.add

    def drafting(self):
        out = step(self)
        for end in out.ended:
            end.drafted, end.accepted = [40] * CELLS, [36] * CELLS
        return out

    def watched(self, chunk):
        known.append(chunk.acceptance)
        add(self, chunk)

    monkeypatch.setattr(ReplayBackend, "step", drafting)
    monkeypatch.setattr(ReplayBackend, "add", watched)
    async with running(engines=1) as cluster, cluster.client() as client:
        first = await client.submit(PROMPTS, n=2, sampling=SamplingParams(max_tokens=60))
        await first.result()
        assert known[0] == ()
        context, buffer = (cluster.services[name].machine for name in ("context", "buffer"))
        await eventually(lambda: min(context.acceptance()[ALL_GROUPS]) > 80 and not context.dirty)
        common = context.acceptance()[ALL_GROUPS]
        assert max(common) <= 90
        await eventually(lambda: buffer.acceptance == common)
        known.clear()
        await cluster.start("e1")
        await cluster.kill("e0")
        second = await client.submit(PROMPTS, n=2, sampling=SamplingParams(max_tokens=60), rollout_number=1)
        await second.result()
        assert known[0] == tuple(rate / 100 for rate in common)
