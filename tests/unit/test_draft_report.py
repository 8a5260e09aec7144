"""What is said of drafts, and where."""

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


def test_status_shows_drafts_of_engines_that_count_them_only():
    for stats, shown in ((DRAFTED, True), (InstanceStats(generated_tokens=5), False)):
        status = Status(
            name="b", incarnation=1, policy="divided", instances=[instance(stats)], rollouts=0,
            requests_waiting=0, requests_running=0,
        )  # fmt: skip
        assert ("acceptance length 3.00" in _text(SystemStatus(services=[], buffer=status))) == shown
