"""What one step of a look at all open requests does, at most."""

import orders
import pytest

from seer.common.policy.length import Estimate
from seer.common.policy.schedule import POLICIES
from seer.common.types import Capacity
from seer.services.buffer import rollout_progress
from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.requests import events
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.requests.state import Limits
from seer.services.buffer.rollout_progress import STEP, Remainders, survey
from seer.services.buffer.sleep_machine import SleepMachine
from seer.services.buffer.statistics import Statistics
from seer.services.buffer.weights.weights_machine import WeightsMachine

CAPACITY = Capacity(kv_blocks=10**6, block_size=16, max_num_seqs=4, max_model_len=400)


@pytest.fixture
def system():
    """Groups of 8 on one engine of a policy that bounds no engine; all are begun, and have one estimate."""
    machine = BufferMachine(
        RequestMachine(POLICIES["static"], Limits(64)), WeightsMachine(1.0), SleepMachine(1.0)
    )
    statistics = Statistics(machine)
    prompts = [str(number) for number in range(250)]
    specs = [events.GroupSpec(prompt, 10) for prompt in prompts]
    estimates = {f"r/{prompt}": Estimate(50.0, 0.5) for prompt in prompts}
    for now, event in enumerate((
        orders.joined("e", CAPACITY), events.GroupsSubmitted("t", "r", 8, 256, specs, submission=1),
        events.EstimatesChanged(estimates, {}),
    )):  # fmt: skip
        statistics.record(now, event, machine.apply(event, now))
    return machine.requests, statistics


def test_a_step_looks_at_few_chunks_though_one_engine_runs_all(system, monkeypatch):
    seen, lived = [], rollout_progress.EndRates.lived
    monkeypatch.setattr(rollout_progress.EndRates, "lived", lambda *given: seen.append(1) or lived(*given))
    most = 0
    for _ in survey(*system, 5.0):
        most, seen[:] = max(most, len(seen)), []
    assert 0 < most <= STEP


def test_how_contexts_slow_steps_is_known_before_any_chunk_has_ended():
    capacity = Capacity(kv_blocks=10**4, block_size=16, max_num_seqs=64, max_model_len=8000)
    machine = BufferMachine(
        RequestMachine(POLICIES["seer"], Limits(4096)), WeightsMachine(1.0), SleepMachine(1.0)
    )
    statistics = Statistics(machine)

    def tell(event, now):
        statistics.record(now, event, machine.apply(event, now))

    def seconds_of_a_token(kv_tokens):
        return 0.01 + 1e-6 * kv_tokens

    tell(orders.joined("e", capacity), 0.0)
    tell(events.EngineReported("e", generated_tokens=0), 0.0)
    tell(events.GroupsSubmitted("t", "r", 8, 6000, [events.GroupSpec("p", 100)], submission=1), 0.0)
    now = generated = 0.0
    for number in range(1, 2000):
        now += seconds_of_a_token(8 * 100 + generated)
        generated += 8
        if number % 80 == 0:
            tell(events.EngineReported("e", generated_tokens=int(generated)), now)
    assert not sum(statistics.chunk_seconds.counts)
    found = statistics.pace.token_seconds()
    later = found.base + 8 * found.request + 40_000 * found.kv_token
    assert later == pytest.approx(seconds_of_a_token(40_000), rel=0.1)


def test_groups_of_which_nothing_is_known_share_their_curves(system, monkeypatch):
    made = []
    monkeypatch.setattr(
        rollout_progress, "Remainders", lambda *given: made.append(given) or Remainders(*given)
    )
    *_, found = survey(*system, 5.0)
    assert found.ranges["r"] is None, "no engine has reported"
    assert len(made) == 2
