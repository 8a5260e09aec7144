"""The fluid engine against vLLM's scheduler stepping one by one (`services/engine/replay/kv_model.py`)."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seer.services.engine.replay.kv_model import KvModel, Sequence
from seer.sim.drafting import CLASSES, Drafting
from seer.sim.instance import Chunk, Instance
from seer.sim.workload import Model

STEP = 0.01


@dataclass(frozen=True)
class Job:
    name: str
    at: float
    length: int
    end: int


@dataclass
class Run:
    """When each job ended, and how often it was preempted."""

    ends: dict[str, float]
    preemptions: Counter[str]

    @property
    def order(self) -> list[str]:
        return sorted(self.ends, key=lambda name: (round(self.ends[name] / STEP), name))


def model(kv_tokens: int, block_size: int = 1, seats: int = 64) -> Model:
    return Model(
        step=STEP, request=1e-4, kv=1e-8, attend=0.0, row=0.0, weights=0.0, prefill=1e-6, pull=0.0,
        kv_tokens=kv_tokens, block_size=block_size, max_num_seqs=seats,
    )  # fmt: skip


def fluid(shape: Model, jobs: list[Job], drafting: Drafting | None = None) -> Run:
    """Run the jobs as `sim/cluster.py` does: wake at the next event or arrival, whichever comes first."""
    instance, run, todo = Instance("e", shape, drafting), Run({}, Counter()), list(jobs)
    now = 0.0
    while len(run.ends) < len(jobs):
        wake = instance.next_event()
        arrival = todo[0].at if todo else float("inf")
        assert min(wake, arrival) >= now, "time moves forward"
        now = min(wake, arrival)
        for chunk in instance.settle(now):
            assert chunk.length == chunk.end
            assert chunk.request_id not in run.ends
            run.ends[chunk.request_id] = now
            run.preemptions[chunk.request_id] += chunk.preemptions
        if arrival == now:
            job = todo.pop(0)
            chunk = Chunk(
                job.name,
                1,
                float(job.length),
                job.end,
                float(job.length),
                kind=len(todo) % CLASSES if drafting else 0,
            )
            instance.add(chunk, now)
        check(instance)
    assert (instance.running, instance.waiting, instance.kv_tokens) == (0, 0, 0.0)
    return run


def check(instance: Instance) -> None:
    held = [instance._clocks[chunk.kind] + chunk.base for chunk in instance._running.values()]
    assert instance.kv_tokens == pytest.approx(sum(held), abs=1e-3)
    assert instance.kv_tokens <= instance.model.kv_tokens + 1e-3
    assert instance.running <= instance.model.max_num_seqs


def stepped(shape: Model, jobs: list[Job]) -> Run:
    kv = KvModel(shape.kv_tokens // shape.block_size, shape.block_size, shape.max_num_seqs)
    run, todo, now = Run({}, Counter()), list(jobs), 0.0
    while len(run.ends) < len(jobs):
        if not kv.running and not kv.waiting:
            now = max(now, todo[0].at)
        while todo and todo[0].at <= now:
            job = todo.pop(0)
            kv.add(Sequence(job.name, job.length, job.end))
        step = kv.step()
        before = sum(sequence.length - 1 for sequence in step.ran)
        now += shape.seconds(len(step.ran), 0.0, before) + shape.prefill * step.prefilled
        for sequence in step.ended:
            run.ends[sequence.name] = now
            run.preemptions[sequence.name] += sequence.preemptions
    return run


def made(seed: int, most: int, over: float = 0.0) -> list[Job]:
    """Return jobs of up to `most` tokens that arrive within `over` seconds."""
    rng = random.Random(seed)
    times = sorted(rng.random() * over for _ in range(rng.randint(2, 30)))
    lengths = [rng.randint(1, most // 5) for _ in times]
    return [
        Job(f"c{number:02}", at, length, length + rng.randint(1, most - length))
        for number, (at, length) in enumerate(zip(times, lengths, strict=True))
    ]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from((400, 800, 2000)), st.sampled_from((1, 4, 64)))
def test_what_starts_together_ends_as_it_would_step_by_step(seed, kv_tokens, seats):
    shape, jobs = model(kv_tokens, 1, seats), made(seed, 360)
    ours, theirs = fluid(shape, jobs), stepped(shape, jobs)
    assert ours.preemptions == theirs.preemptions
    assert ours.order == theirs.order
    assert all(abs(ours.ends[name] - theirs.ends[name]) < 2 * STEP for name in ours.ends)


def compared(block_size: int, kv_tokens: int, over: float) -> tuple[float, float, float]:
    """Return, over many runs, our preemptions and run time over theirs, and the mean error of ends in steps."""
    ours, theirs = [], []
    for seed in range(40):
        shape, jobs = model(kv_tokens, block_size), made(seed, kv_tokens // 2, over)
        ours.append(fluid(shape, jobs))
        theirs.append(stepped(shape, jobs))
    preemptions = [sum(run.preemptions.total() for run in runs) for runs in (ours, theirs)]
    totals = [sum(max(run.ends.values()) for run in runs) for runs in (ours, theirs)]
    errors = [
        abs(our.ends[name] - their.ends[name]) / STEP
        for our, their in zip(ours, theirs, strict=True)
        for name in our.ends
    ]
    assert preemptions[1] > 500, "or there was nothing to compare"
    return preemptions[0] / preemptions[1], totals[0] / totals[1], sum(errors) / len(errors)


def test_arrivals_between_steps_change_little():
    """A step that has begun goes on without those who come: they are seen up to a step later."""
    preemptions, total, error = compared(block_size=1, kv_tokens=800, over=3.0)
    assert preemptions == pytest.approx(1, abs=0.01)
    assert total == pytest.approx(1, abs=0.002)
    assert error < 2


def test_blocks_of_16_tokens_change_little():
    """Half a block a request is lost to rounding, of which the fluid knows nothing."""
    preemptions, total, _ = compared(block_size=16, kv_tokens=4000, over=0.0)
    assert preemptions == pytest.approx(1, abs=0.03)
    assert total == pytest.approx(1, abs=0.015)


def test_with_drafts_all_end_sooner_and_the_books_hold():
    shape = model(800)
    for seed in range(5):
        jobs = made(seed, 360, over=1.0)
        drafted, plain = fluid(shape, jobs, Drafting()), fluid(shape, jobs)
        assert drafted.ends.keys() == plain.ends.keys()
        assert max(drafted.ends.values()) < max(plain.ends.values())
        assert fluid(shape, jobs, Drafting()) == drafted, "the same calls, the same results"


def test_what_a_request_left_is_there_until_its_memory_is_needed():
    instance = Instance("e", model(1000), None)
    instance.leave("a", 300.0)
    instance.leave("b", 500.0)
    assert instance.take("a") == 300.0
    assert instance.take("a") == 0.0, "it was taken"
    instance.leave("a", 300.0)
    instance.add(Chunk("c", 1, 400.0, 500), 0.0)
    assert instance.take("b") == 0.0, "the first to leave goes first"
    assert instance.take("a") == 300.0
