"""What a rollout of trajectories is refused for, before anything is sent."""

import numpy as np
import pytest
from fake_buffer import connected

from seer.client import InvalidField, Prompt, SamplingParams
from seer.common.types import TurnSpec


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("max_context", {"max_context": 3}),
        ("max_context", {"max_context": 2**24 + 1}),
        ("max_open", {"max_open": 0}),
        ("turns.idle_seconds", {"idle_seconds": -1.0}),
        ("turns.idle_seconds", {"idle_seconds": float("nan")}),
        ("n", {"n": 0}),
        ("sampling.top_p", {"sampling": SamplingParams(top_p=2.0)}),
        ("prompts.id", {"prompts": [Prompt("x" * 398, token_ids=[1])]}),
    ],
)
async def test_the_field_is_named(field, given):
    asked = {"prompts": [[1, 2, 3]], "n": 2, "max_context": 100, **given}
    async with connected() as (_, client):
        with pytest.raises(InvalidField, match=f"^{field} = "):
            client.trajectories(asked.pop("prompts"), **asked)
        assert not client._active


@pytest.mark.parametrize(
    "other",
    [
        {"n": 3},
        {"seed": 1},
        {"rollout_number": 5},
        {"sampling": SamplingParams(max_tokens=8)},
        {"max_context": 99},
        {"prompts": [Prompt("a", token_ids=[1, 3])]},
        {"prompts": [Prompt("b", token_ids=[1, 2])]},
    ],
)
async def test_a_journal_is_of_use_for_the_same_run_alone(tmp_path, other):
    asked = {
        "prompts": [Prompt("a", token_ids=[1, 2])], "n": 2, "max_context": 100, "rollout_number": 4,
        "journal": tmp_path / "journal",
    }  # fmt: skip
    async with connected() as (_, client):
        async with client.trajectories(**asked) as rollout:
            run = rollout.run_id
        async with client.trajectories(**asked, idle_seconds=7.0, max_open=3) as rollout:
            assert rollout.run_id == run
        with pytest.raises(InvalidField, match=r"^journal = .* is of a run with"):
            client.trajectories(**{**asked, **other})


async def test_a_journal_that_cannot_be_used_leaves_no_rollout(tmp_path):
    (tmp_path / "poem").write_text("two lines\nof words\n")
    async with connected() as (_, client):
        with pytest.raises(InvalidField, match=r"^journal = .*is no journal"):
            client.trajectories([[1, 2]], max_context=9, journal=tmp_path / "poem", rollout_id="r")
        assert not client._active
        assert "r" not in client._active
        assert client.open_rollout("r").id == "r"


async def test_a_turn_needs_a_place_and_one_response():
    async with connected() as (_, client):
        rollout = client.open_rollout()
        for given in ({"group": ""}, {"group": "g", "n": 2}):
            with pytest.raises(InvalidField, match=r"^turn = "):
                rollout.submit([1, 2], turn=TurnSpec(2), **given)
        with pytest.raises(InvalidField, match=r"^turns.prompt_len = 3: must be in \[1, 2\]"):
            rollout.submit([1, 2], turn=TurnSpec(3), group="g")
        assert rollout.counts.submitted == 0


@pytest.mark.parametrize(
    ("field", "turn"),
    [
        ("prompt_len", TurnSpec(0)),
        ("prompt_len", TurnSpec(11)),
        ("generated", TurnSpec(4, -1)),
        ("generated", TurnSpec(4, 7)),
        ("cap", TurnSpec(4, 6, 6)),
        ("cap", TurnSpec(4, 6, 2**24 + 1)),
        ("idle_seconds", TurnSpec(4, 6, 7, -0.5)),
        ("idle_seconds", TurnSpec(4, 6, 7, 1e9)),
    ],
)
def test_a_turn_that_cannot_be_is_refused_by_its_field(field, turn):
    TurnSpec(4, 6, 7, 0.0, "name").check(10)
    with pytest.raises(InvalidField, match=f"^turns.{field} = "):
        turn.check(10)


def test_only_single_responses_of_named_groups_of_open_rollouts_are_turns():
    from seer.common import wire
    from seer.services.buffer import submissions

    asked = {
        "rollout_id": "r", "rollout_number": 0, "seed": 0, "n": 1, "sampling": SamplingParams(max_tokens=8),
        "prompt_ids": ["a", "b"], "lengths": [1, 2], "tokens": np.array([1, 2, 3], np.int32), "open": True,
        "groups": ["g", "g"], "first_indices": [0, 1], "turns": [TurnSpec(1), TurnSpec(1, 1, 8)],
    }  # fmt: skip
    prompts = submissions.prompts(wire.Submit(**asked))
    assert [prompt.turn for prompt in prompts.values()] == asked["turns"]
    for other in ({"n": 2}, {"open": False}, {"groups": []}, {"groups": ["g", ""]}, {"turns": [TurnSpec(1)]}):
        with pytest.raises(InvalidField, match=r"^turns = "):
            submissions.prompts(wire.Submit(**{**asked, **other}))
    with pytest.raises(InvalidField, match=r"^turns.prompt_len = "):
        submissions.prompts(wire.Submit(**{**asked, "turns": [TurnSpec(2), TurnSpec(1)]}))
