"""How the client names coming prompts, against a scripted buffer."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fake_buffer import answering, connected, progress

from seer.client import (
    InvalidField,
    Placed,
    Prompt,
    RequestRefused,
    SamplingParams,
    Unreachable,
    prepared_image,
)
from seer.client import prompts as prompts_module
from seer.client.used_noise import ROLLOUTS_PER_VERSION
from seer.common.wire import Accepted, NextPrompts, Refused, Submit


def accepts(message):
    if not isinstance(message, NextPrompts):
        return []
    return [
        Accepted(
            rollout_id=message.rollout_id, prompt_ids=message.prompt_ids, submission=message.submission,
            weight_version=3,
        )
    ]  # fmt: skip


def named(buffer):
    return [message for message in buffer.got if isinstance(message, NextPrompts)]


async def test_prompts_are_named_in_parts_with_the_noise_of_the_next_submission(monkeypatch):
    monkeypatch.setattr(prompts_module, "BATCH_PROMPTS", 2)
    sampling = SamplingParams(max_tokens=9, top_p=0.5)
    async with connected() as (buffer, client):
        buffer.script = accepts
        client.weight_version = 3
        await client.next_prompts([Prompt("a", token_ids=[1, 2]), [3], [4]], n=3, sampling=sampling, seed=5)
        first, second = named(buffer)
        assert (first.prompt_ids, second.prompt_ids) == (["a", "1"], ["2"])
        assert (first.lengths, first.tokens.tolist()) == ([2, 1], [1, 2, 3])
        assert (first.n, first.seed, first.sampling) == (3, 5, sampling)
        assert not first.stream
        assert not first.open
        assert first.rollout_number == second.rollout_number == 4 * ROLLOUTS_PER_VERSION
        assert first.rollout_id == second.rollout_id
        assert first.submission < second.submission
        await client.next_prompts([[1]], rollout_number=8)
        assert named(buffer)[-1].rollout_number == 8
        assert named(buffer)[-1].rollout_id != first.rollout_id
        buffer.script = answering()
        rollout = await client.submit([[1]], n=3, rollout_number=8)  # its noise was not used
        await rollout.result()
    submitted = [message for message in buffer.got if isinstance(message, Submit)][-1]
    assert submitted.submission > second.submission
    assert not client._answers


async def test_it_fails_with_the_buffers_reason_or_after_the_deadline():
    async with connected() as (buffer, client):
        with pytest.raises(Unreachable, match=r"did not answer within 0\.05 s"):
            await client.next_prompts([[1]], timeout_seconds=0.05)
        buffer.script = lambda message: [
            Refused(
                code="refused", message="dgds.remember_tokens = 0", rollout_id=message.rollout_id,
                prompt_ids=message.prompt_ids, submission=message.submission,
            )
        ] if isinstance(message, NextPrompts) else []  # fmt: skip
        with pytest.raises(RequestRefused, match=r"remember_tokens = 0") as refused:
            await client.next_prompts([[1], [2]])
        assert refused.value.prompt_ids == ("0", "1")
        sent = len(named(buffer))
        image = prepared_image(
            "image", pixel_values=np.zeros((1, 2), np.float32), image_grid_thw=np.array([[1, 2, 2]])
        )
        for prompts, options, field in (
            ([Prompt("a", token_ids=[1, 2], images=[Placed(image, 0, 1)])], {}, r"prompts\[0\]\.images"),
            ([[1]], {"n": 0}, "n"), ([], {}, "prompts"), ([[1]], {"rollout_number": 2**63}, "rollout_number"),
        ):  # fmt: skip
            with pytest.raises(InvalidField, match=field):
                await client.next_prompts(prompts, **options)
        assert len(named(buffer)) == sent
        assert not client._answers
    with pytest.raises(Unreachable, match="closed"):
        await client.next_prompts([[1]])


@pytest.mark.parametrize(("broken", "why"), [(False, "the client was closed"), (True, "no such peer")])
async def test_it_fails_as_soon_as_the_connection_ends(broken, why):
    async with connected() as (buffer, client):
        naming = [asyncio.create_task(client.next_prompts([[1]], timeout_seconds=3600)) for _ in range(2)]
        await buffer.until(NextPrompts, 2)
        if broken:

            async def fails():
                raise Unreachable("no such peer")

            client._channel.recv = fails
            await buffer.say(progress("unknown", 1))  # after it the client receives anew
        else:
            await client.close()
        async with asyncio.timeout(10):
            for call in naming:
                with pytest.raises(Unreachable, match=f"{client.endpoint}: {why}"):
                    await call
        assert not client._answers
