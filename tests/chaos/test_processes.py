"""A fixed part of the process campaign; one more with real engines."""

import asyncio
from pathlib import Path

import pytest

from chaos.processes import Load, campaign

MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"


def check(outcomes, faults):
    assert not any(outcome.problems for outcome in outcomes), outcomes
    assert sum(len(outcome.faults) for outcome in outcomes) >= faults
    assert sum(outcome.responses for outcome in outcomes) > 0


def test_no_kill_or_stop_loses_doubles_or_changes_a_response():
    check(asyncio.run(campaign(range(4), Load())), faults=12)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_same_with_real_engines():
    load = Load(prompts=8, max_tokens=300, faults=3, burst_seconds=4.0)
    check(asyncio.run(campaign(range(3), load, MODEL)), faults=5)
