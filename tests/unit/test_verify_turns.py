"""`seer verify --turns`: its tool, its cells, and the command on the replay backend."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prepared_images import placed, prepared
from verify_runs import prompts as prompts
from verify_runs import replayed

from seer.client import Group, Prompt
from seer.client.results import Response
from seer.common.errors import SeerError
from seer.common.types import SamplingParams, TurnSpec
from seer.verify import turns
from seer.verify.cells import CELLS, TURN_CELLS

PROMPT = np.array([5, 6, 7, 8, 9], np.int32)


def test_what_the_tool_says_follows_from_what_was_generated():
    said = {
        bytes(turns.tool(PROMPT, (), np.array([a, b], np.int32))[0].tobytes())
        for a in range(9)
        for b in range(9)
    }
    assert len(said) > 20
    assert turns.tool(PROMPT, (), PROMPT)[0].tobytes() == turns.tool(PROMPT, (), PROMPT.copy())[0].tobytes()
    for end in range(1, 6):
        added, shown = turns.tool(PROMPT, (), PROMPT[:end])
        assert not shown
        assert turns.LEAST_ADDED <= len(added) <= turns.MOST_ADDED
        assert set(added.tolist()) <= set(PROMPT.tolist())
        assert added.dtype == np.int32


def test_the_tool_shows_an_image_of_the_prompt_again():
    prompt = np.array([5, 9, 9, 6, 9, 7], np.int32)  # 9 is the placeholder
    images = [placed(1, 1, 2), placed(2, 4)]
    seen = set()
    for end in range(40):
        said, shown = turns.tool(prompt, images, np.array([end], np.int32))
        (again,) = shown
        text, image = said[: again.offset], said[again.offset :]
        assert turns.LEAST_ADDED <= len(text) <= turns.MOST_ADDED
        assert set(text.tolist()) <= {5, 6, 7}
        assert image.tolist() == [9] * again.length
        assert again.length == {prepared(1).name: 2, prepared(2).name: 1}[again.image.name]
        seen.add(again.image.name)
    assert len(seen) == 2
    said, _ = turns.tool(np.array([9, 9], np.int32), [placed(1, 0, 2)], prompt)
    assert said.tolist() == [9, 9], "there is no text to say"


def test_no_placeholder_is_sampled_where_it_would_be_sent_again():
    sampling = SamplingParams(logit_bias={3: 1.0})
    prompts = [Prompt("a", token_ids=[5, 9, 7], images=[placed(1, 1)]), Prompt("b", token_ids=[8])]
    assert turns.without_placeholders(sampling, prompts).logit_bias == {3: 1.0, 9: -100.0}
    assert turns.without_placeholders(sampling, prompts[1:]) == sampling


@pytest.mark.parametrize("resent", [True, False])
async def test_every_turn_shows_all_images_so_far(resent: bool):
    rollout = Rollout()
    client = SimpleNamespace(open_rollout=lambda **_: rollout)
    job = SimpleNamespace(n=1, sampling=SamplingParams(max_tokens=40), seed=3, cell_seconds=9.0)
    prompt = Prompt("p", token_ids=np.array([5, 9, 9, 6]), images=[placed(1, 1, 2)])
    (group,), shown = await turns.run(client, [prompt], job, resent)
    whole = [5, 9, 9, 6, *group.responses[0].token_ids.tolist()]
    assert len(shown["p", 0]) == turns.TURNS
    for number, asked in enumerate(rollout.asked):
        assert asked["images"] == shown["p", 0][: number + 1]
        for each in asked["images"]:
            assert each.image.name == prepared(1).name
            assert whole[each.offset : each.offset + each.length] == [9, 9]
        assert asked["tokens"].count(9) == 2 * len(asked["images"])


def test_a_trajectory_has_the_tokens_of_a_response_and_its_tools():
    sampling = SamplingParams(max_tokens=403)
    assert turns.of_a_turn(sampling).max_tokens == 100
    assert turns.most_tokens(sampling) == 400 + 3 * turns.MOST_ADDED
    assert turns.of_a_turn(SamplingParams(max_tokens=1)).max_tokens == 1


class Rollout:
    """Keeps what it is asked for, and answers with as many tokens as the turn's number."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.ended: list[str] = []

    def submit(self, prompt: Prompt, **asked: object) -> Rollout:
        tokens, images = prompt.token_ids.tolist(), list(prompt.images)
        self.asked.append({"id": prompt.id, "tokens": tokens, "images": images, **asked})
        return self

    async def result(self) -> Group:
        number = len(self.asked)
        tokens = np.full(number, 40 + number, np.int32)
        found = Response(0, tokens, np.full(number, -1.0, np.float32), None, "length", "")
        return Group("", PROMPT, {}, 0, "", (found,), 1, 0, 0)

    async def cancel(self) -> None:
        """Nothing: the turn has ended."""

    def end_trajectory(self, prompt_id: str) -> None:
        self.ended.append(prompt_id)


@pytest.mark.parametrize("resent", [True, False])
async def test_only_a_reference_sends_turns_that_nobody_knows_as_turns(resent: bool):
    rollout = Rollout()
    client = SimpleNamespace(open_rollout=lambda **_: rollout)
    job = SimpleNamespace(n=1, sampling=SamplingParams(max_tokens=40), seed=3, cell_seconds=9.0)
    (group,), shown = await turns.run(client, [Prompt("p", token_ids=PROMPT)], job, resent)
    assert shown == {("p", 0): []}
    (response,) = group.responses
    whole = [*PROMPT.tolist(), *response.token_ids.tolist()]
    for number, asked in enumerate(rollout.asked):
        assert asked["tokens"] == whole[: len(asked["tokens"])]
        assert (asked["group"], asked["first_index"], asked["sampling"].max_tokens) == ("p", 0, 10)
        expected = None if resent else TurnSpec(5, sum(range(number + 1)), turns.most_tokens(job.sampling))
        assert asked["turn"] == expected
    assert rollout.ended == ([] if resent else [rollout.asked[-1]["id"]])
    generated = response.logprobs == -1.0
    assert response.token_ids[generated].tolist() == [41, 42, 42, 43, 43, 43, 44, 44, 44, 44]
    assert set(response.token_ids[~generated].tolist()) <= set(PROMPT.tolist())
    assert set(response.logprobs[~generated].tolist()) == {0.0}


async def test_trajectories_that_take_too_long_are_an_error():
    rollout = Rollout()
    rollout.result = asyncio.Event().wait
    job = SimpleNamespace(n=1, sampling=SamplingParams(max_tokens=40), seed=3, cell_seconds=0.01)
    with pytest.raises(SeerError, match="not all trajectories ended"):
        await turns.run(
            SimpleNamespace(open_rollout=lambda **_: rollout), [Prompt("p", token_ids=PROMPT)], job, True
        )


def test_only_the_reference_knows_nothing_of_turns():
    reference, *others = TURN_CELLS.values()
    assert reference.resent
    assert not any(cell.resent for cell in others)
    assert all(cell.turns and not cell.shares_engines for cell in TURN_CELLS.values())
    assert not any(cell.turns or cell.resent for cell in CELLS.values())
    assert [cell.name for cell in others] == ["turns-migrate", "turns-pool", "turns-recompute"]


def test_cells_with_turns_agree(prompts: Path):
    result, found = replayed(prompts, "--turns", "--max-tokens", 160, "--min-tokens", 1000)
    assert result.exit_code == 0, result.output
    assert list(found["skipped"]) == ["turns-pool"]
    assert [cell["name"] for cell in found["cells"]] == ["turns-migrate", "turns-recompute"]
    migrated, _ = found["cells"]
    assert migrated["counters"]["migrations"] > migrated["counters"]["responses"]
    for cell in [found["reference"], *found["cells"]]:
        counters = cell["counters"]
        assert counters["tokens"] < counters["context_tokens"], "tools and prompts are no output"
        assert counters["chunks"] >= turns.TURNS * counters["responses"]


def test_a_planted_fault_is_found_and_spoils_no_other_cell(prompts: Path):
    options = ("--max-tokens", 160, "--min-tokens", 10, "--plant-fault", "--matrix", "turns-migrate")
    result, found = replayed(prompts, "--turns", *options)
    assert result.exit_code == 1
    assert "the planted fault was found (in turns-migrate" in result.output
    assert found["cells"][0]["bug"] > 0


def test_cells_of_the_other_matrix_are_refused(prompts: Path):
    result, found = replayed(prompts, "--turns", "--matrix", "chunk-1")
    assert result.exit_code == 2
    assert "choose among turns-one-go, turns-migrate, turns-pool, turns-recompute" in result.output
    assert not found
