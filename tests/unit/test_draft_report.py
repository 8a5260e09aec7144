"""What is said of drafts, and where; and what `seer status` says of an engine."""

from msgspec.structs import replace

from seer.cli.status import SystemStatus, _text
from seer.common.types import Capacity, InstanceStats
from seer.common.wire import InstanceStatus, Status
from seer.report.engine_use import acceptance_length, draft_text, total

DRAFTED = InstanceStats(
    steps=40,
    generated_tokens=300,
    verifications=100,
    drafted_tokens=400,
    accepted_tokens=200,
    draft_seconds=0.01,
    step_seconds=2.0,
)


def test_totals_are_over_all_instances():
    use = total([DRAFTED, DRAFTED, InstanceStats(generated_tokens=1, verifications=50)])
    assert (use.drafted_tokens, use.accepted_tokens, acceptance_length(use)) == (800, 400, 601 / 250)
    assert acceptance_length(total([])) == 0.0


def test_the_text_says_length_tokens_and_time():
    said = draft_text(DRAFTED)
    assert said == (
        "acceptance length 3.00, 200 of 400 drafted tokens accepted, drafting took 0.5% of the time"
    )


def instance(stats):
    capacity = Capacity(kv_blocks=10, block_size=16, max_num_seqs=2, max_model_len=64)
    return InstanceStatus(name="e", capacity=capacity, stats=stats, chunks=0, reserved_blocks=0)


def shown(one):
    status = Status(
        name="b", incarnation=1, policy="divided", instances=[one], rollouts=0, requests_waiting=0, requests_running=0
    )  # fmt: skip
    return _text(SystemStatus(services=[], buffer=status))


def test_status_says_of_how_many_ranks_an_engine_is_and_how_many_of_their_steps_were_dummies():
    for parts, said in ((1, "KV 7/10 blocks used, 0"), (4, "used on 4 ranks (30% of their steps without a")):
        one = instance(InstanceStats(free_blocks=3, steps=100, dummy_steps=120))
        one = replace(one, capacity=replace(one.capacity, parts=parts))
        assert said in shown(one)


def test_status_shows_drafts_of_engines_that_count_them_only():
    for stats, drafted in ((DRAFTED, True), (InstanceStats(generated_tokens=5), False)):
        assert ("acceptance length 3.00" in shown(instance(stats))) == drafted
