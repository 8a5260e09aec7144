"""Drafts that tests of the real engine order, of one path or of several, and what engines count of further paths."""

from __future__ import annotations

from engine_cases import KEY, Response, chunk, run

from seer.common.policy.draft_costs import StepCosts
from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.drafts.draft_script import DraftScript

PLANS = {
    "right_first": ("right", "wrong", "wrong"),
    "right_second": ("wrong", "right", "random"),
    "right_third": ("wrong", "random", "right"),
    "all_wrong": ("wrong", "random", "wrong"),
    "forks": ("truncated", "truncated", "right"),
}
"""What each path of a draft is."""


def script(backend: VllmBackend, plan: str, known: dict[int, list[int]] | None = None) -> None:
    """Draft by a plan, or one path of a kind; `known` has what responses will say, by index."""
    first, *others = PLANS.get(plan, (plan,))
    vocab = backend.core.vocab_size
    backend.probe.script_drafts(DraftScript(kind=first, vocab=vocab, known=known or {}, others=tuple(others)))


def draft_always(backend: VllmBackend, most: int) -> None:
    """Draft one path of up to `most` tokens in every step: whether drafts pay here is not the point."""
    free = StepCosts(batches=(1, 32), drafts=(0, most), grid=((1.0, 1.0001),) * 2, sibling=1.0)
    backend.core.rpc("seer_set_costs", costs=free, max_paths=1)
    backend._drafting.start_always()


def counts(backend: VllmBackend) -> dict[str, int]:
    """Return what became of further paths since the engine began."""
    (found,) = backend.core.rpc("seer_path_counts")
    return {name: found.get(name, 0) for name in ("rows", "dropped", "won", "conflicts")}


def gained(backend: VllmBackend, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in counts(backend).items()}


def _drafted(backend: VllmBackend, chunks: list[Chunk], plan: str, plain: dict[str, Response]) -> int:
    """Run chunks with drafts: their tokens are as without; return how many were preempted."""
    before = backend.stats().preemptions
    script(backend, plan, {one.index: plain[one.request_id].tokens for one in chunks})
    found = run(backend, chunks)
    assert all(found[name].tokens == response.tokens for name, response in plain.items())
    assert backend.stats().free_blocks == backend.capacity.kv_blocks
    return backend.stats().preemptions - before


def check_preempted_go_on(backend: VllmBackend, plan: str) -> None:
    """Run more with drafts than fits into memory."""
    sampling = SamplingParams(max_tokens=40, temperature=1.1, presence_penalty=0.5, ignore_eos=True)
    chunks = [
        chunk(str(i), sampling, index=i, key=KEY + i, prompt=[1 + i, *range(3, 50 + i)]) for i in range(16)
    ]
    script(backend, "none")
    alone = {one.request_id: run(backend, [one])[one.request_id] for one in chunks}
    assert _drafted(backend, chunks, plan, alone) > 0


def check_only_reserved_blocks(backend: VllmBackend, chunks: list[Chunk], plan: str) -> None:
    """Run chunks with drafts that wait for room: none is preempted."""
    script(backend, "none")
    assert _drafted(backend, chunks, plan, run(backend, chunks)) == 0
