"""Prompts with images in a whole system: equal tokens, each image once on each way, and every loss by name.

The replay engines' tokens are a function of the images of a chunk, as vLLM's are, so a chunk that lacks one, or has
another one, gives other tokens.
"""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from cluster_harness import running
from prepared_images import placed, prepared
from virtual_time import VIRTUAL, eventually

from seer.client import Placed, Prompt, RequestRefused, RolloutFailed, SamplingParams
from seer.common import wire
from seer.common.config import BufferConfig
from seer.common.errors import InvalidField
from seer.common.net.channel import Channel
from seer.common.net.hub import Hub
from seer.common.types import MAX_IMAGE_BYTES
from seer.services.buffer.response_store import Store
from seer.services.engine.replay.backend import image_salt

pytestmark = VIRTUAL

SAMPLING = SamplingParams(max_tokens=90, ignore_eos=True)
LARGE = wire.IMAGE_PART_BYTES // 2  # numbers of an image of 4 MiB
PROMPTS = [
    Prompt("a", token_ids=[1, 2, 3, 4, 5], images=[placed(1, 0), placed(2, 2, 2)]),
    Prompt("b", token_ids=[1, 2, 3, 4, 5], images=[placed(2, 0), placed(1, 2, 2)]),
    Prompt("c", token_ids=[1, 2, 3], images=[placed(3, 1, 1, LARGE)]),
    Prompt("d", token_ids=[1, 2, 3, 4, 5]),
]
IMAGES = {each.image.name: each.image for prompt in PROMPTS for each in prompt.images}


async def rolled(cluster, client, prompts=PROMPTS, **options):
    rollout = await client.submit(prompts, n=4, sampling=SAMPLING, rollout_number=0, repeat=True, **options)
    return {
        (group.prompt_id, response.index): response.token_ids.tolist()
        for group in await rollout.result()
        for response in group.responses
    }


class Carried:
    """Counts the bytes of images on each way, by peer and image, and keeps the chunks that are sent."""

    def __init__(self, monkeypatch):
        self.bytes, self.chunks = Counter(), []
        reply, sent, chunk = Hub.reply, Channel.send, Store.chunk

        def chunks(*args, **options):
            self.chunks.append(chunk(*args, **options))
            return self.chunks[-1]

        async def sends(channel, message):
            if isinstance(message, wire.ImageData):
                self.bytes["trainer", message.name] += len(message.data)
            await sent(channel, message)

        async def replies(hub, address, message):
            if isinstance(message, wire.ImageData):
                self.bytes[address, message.name] += len(message.data)
            return await reply(hub, address, message)

        monkeypatch.setattr(Store, "chunk", chunks)
        monkeypatch.setattr(Channel, "send", sends)
        monkeypatch.setattr(Hub, "reply", replies)


async def test_tokens_are_equal_whatever_the_schedule_and_each_image_comes_once(monkeypatch):
    found = []
    for engines, policy, chunk in ((1, "seer", 200), (2, "seer", 16), (3, "divided", 7)):
        carried = Carried(monkeypatch)
        async with running(engines, buffer=BufferConfig(chunk_size=chunk, policy=policy)) as cluster:
            async with cluster.client() as client:
                found.append(await rolled(cluster, client))
                assert await rolled(cluster, client) == found[-1], "with what is kept of them"
            images = cluster.services["buffer"]._images.machine
            await eventually(lambda images=images: not images._users)
        monkeypatch.undo()
        for (_, name), count in carried.bytes.items():
            assert count == IMAGES[name].size, "each image once on each way"
        assert len(carried.bytes) == len(IMAGES) * (1 + engines)
        assert len(carried.chunks) >= 16
        for order in carried.chunks:
            (prompt,) = [each for each in PROMPTS if f"/{each.id}#" in order.request_id]
            assert order.images == [each.on_wire for each in prompt.images], "all of them, in every chunk"
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for tokens in found[0].values()}) == len(found[0]) == 16


async def test_a_chunk_that_lacks_an_image_would_give_other_tokens(monkeypatch):
    """What the other tests here rely on: with a buffer that forgets images in later chunks, they fail."""
    async with running(buffer=BufferConfig(chunk_size=16)) as cluster, cluster.client() as client:
        right = await rolled(cluster, client)
    chunk = Store.chunk

    def forgetful(*args, **options):
        order = chunk(*args, **options)
        if len(order.tokens) > order.prompt_len:
            order.images = []
        return order

    monkeypatch.setattr(Store, "chunk", forgetful)
    async with running(buffer=BufferConfig(chunk_size=16)) as cluster, cluster.client() as client:
        wrong = await rolled(cluster, client)
    assert {key[0] for key in right if right[key] != wrong[key]} == {"a", "b", "c"}
    assert image_salt([]) == 0


async def test_other_pixels_under_a_known_name_are_refused_at_every_hop():
    forged = replace(prepared(1), data=prepared(77).data)
    prompts = [Prompt("a", token_ids=[1, 2], images=[Placed(forged, 0, 1)]), PROMPTS[3]]
    async with running(1) as cluster, cluster.client() as client:
        rollout = await client.submit(prompts, n=1, sampling=SAMPLING)
        with pytest.raises(RequestRefused, match="is not the name of these bytes"):
            await rollout.result()
        assert [group.prompt_id for group in rollout.groups] == ["d"]
        right = await rolled(cluster, client)

        folder = cluster.services["buffer"]._images._folder.root  # and whoever can write there
        (folder / prepared(3, LARGE).name).write_bytes(prepared(4, LARGE).data.tobytes())
        await cluster.start("e1")
        await cluster.kill("e0")
        rollout = await client.submit(PROMPTS, n=4, sampling=SAMPLING, rollout_number=0, repeat=True)
        with pytest.raises(RolloutFailed, match="is not in this buffer: submit it again"):
            await rollout.result()
        assert list(rollout.failures) == ["c"]
        for group in rollout.groups:
            tokens = [response.token_ids.tolist() for response in group.responses]
            assert tokens == [right[group.prompt_id, index] for index in range(4)]
        assert await rolled(cluster, client) == right, "its trainer has the right one, and sends it again"


async def test_trajectories_show_images_that_their_tools_answer_with(monkeypatch):
    async def agent(trajectory):
        for turn in range(3):
            await trajectory.generate()
            if turn < 2:
                trajectory.append([7, 8, 9], images=[placed(10 + turn, 1, 2)])
        return [(each.image.name, each.offset) for each in trajectory.images]

    async def run(engines, chunk):
        async with (
            running(engines, buffer=BufferConfig(chunk_size=chunk)) as cluster,
            cluster.client() as client,
        ):
            given = {
                "n": 2,
                "sampling": SamplingParams(max_tokens=24),
                "max_context": 200,
                "rollout_number": 0,
            }
            async with client.trajectories(PROMPTS, **given) as rollout:
                groups = [group async for group in rollout.run(agent)]
        return {
            (each.prompt_id, each.index): (each.context.tolist(), each.loss_mask.tolist(), each.result)
            for group in groups
            for each in group.trajectories
        }

    carried = Carried(monkeypatch)
    found = await run(2, 8)
    assert found == await run(1, 200)
    assert max(len(order.images) for order in carried.chunks) == 4
    for prompt in PROMPTS:
        context, mask, shown = found[prompt.id, 0]
        assert len(shown) == len(prompt.images) + 2
        for name, offset in shown[-2:]:
            assert name in (prepared(10).name, prepared(11).name)
            assert context[offset : offset + 2] == [8, 9]
            assert not any(mask[offset - len(prompt.token_ids) :][:2])


async def test_an_image_that_a_tools_answer_has_a_place_for_and_lacks_is_refused():
    async def agent(trajectory):
        await trajectory.generate()
        for tokens, images in (([7, 1, 9], []), ([1, 1, 7, 1], [placed(10, 0, 2)])):
            with pytest.raises(InvalidField, match="no images stand for them"):
                trajectory.append(tokens, images=images)
        before = trajectory.context.tolist()
        trajectory.append([7, 1, 1], images=[placed(10, 1, 2)])
        assert trajectory.context.tolist() == [*before, 7, 1, 1], "what was refused left nothing"
        return [each.offset for each in trajectory.images]

    prompts = [Prompt("a", token_ids=[1, 1, 3], images=[placed(1, 0, 2)])]
    async with running(1) as cluster, cluster.client() as client:
        async with client.trajectories(prompts, n=1, sampling=SAMPLING, max_context=400) as rollout:
            (group,) = [group async for group in rollout.run(agent)]
        (found,) = group.trajectories
        assert found.result == [0, len(found.context) - 2]


async def test_a_buffer_that_is_killed_while_images_travel_gets_them_again(tmp_path):
    settings = BufferConfig(chunk_size=16, images=str(tmp_path))
    async with running(2, buffer=settings) as cluster, cluster.client() as client:
        right = await rolled(cluster, client)
    many = [Prompt(f"m{seed}", token_ids=[1, 2], images=[placed(seed, 0, 1, LARGE)]) for seed in range(12)]
    async with running(2, buffer=settings) as cluster, cluster.client() as client:
        expected = await rolled(cluster, client, [*PROMPTS, *many])
    assert {key: expected[key] for key in right} == right
    for folder in ("kept", "lost"):
        settings = BufferConfig(chunk_size=16, images=str(tmp_path / folder) if folder == "kept" else "")
        async with running(2, buffer=settings) as cluster, cluster.client() as client:
            task = asyncio.create_task(rolled(cluster, client, [*PROMPTS, *many]))
            images = cluster.services["buffer"]._images.machine
            for _ in range(2):
                await eventually(lambda images=images: images.bytes > 3 * LARGE)
                await cluster.kill("buffer")
                await cluster.start("buffer")
                images = cluster.services["buffer"]._images.machine
            assert await task == expected


async def test_an_engine_that_is_killed_costs_time_alone():
    async with running(2, buffer=BufferConfig(chunk_size=16)) as cluster, cluster.client() as client:
        right = await rolled(cluster, client)
        task = asyncio.create_task(rolled(cluster, client, rollout_id="again"))
        await eventually(lambda: cluster.services["e0"].running)
        await cluster.kill("e0")
        await asyncio.sleep(1)
        await cluster.start("e0")
        assert await task == right


async def test_images_beyond_what_the_buffer_keeps_fail_their_prompts_by_name():
    half = MAX_IMAGE_BYTES // 4 // 2
    large = [Prompt(f"l{seed}", token_ids=[1, 2], images=[placed(seed, 0, 1, half)]) for seed in (1, 2)]
    async with (
        running(1, buffer=BufferConfig(image_bytes=MAX_IMAGE_BYTES)) as cluster,
        cluster.client() as client,
    ):
        rollout = await client.submit([*PROMPTS, *large], n=1, sampling=SamplingParams(max_tokens=900))
        with pytest.raises(RequestRefused, match=r"buffer\.image_bytes"):
            await rollout.result()
        assert len(rollout.groups) == len(PROMPTS) + 1
        (refused,) = rollout.failures
        assert refused in ("l1", "l2")
        await rolled(cluster, client, large[:1])
        await rolled(cluster, client, large[1:])


async def test_images_that_never_come_fail_their_prompts_alone(monkeypatch):
    async with running(1) as cluster, cluster.client() as client:
        monkeypatch.setattr(client._uploads, "add", lambda images: None)
        rollout = await client.submit(PROMPTS, n=1, sampling=SAMPLING)
        with pytest.raises(RequestRefused, match="nothing of its trainer's images has come for 30 s"):
            await rollout.result()
        assert [group.prompt_id for group in rollout.groups] == ["d"]
        assert sorted(rollout.failures) == ["a", "b", "c"]


async def test_prompts_that_are_cancelled_while_they_wait_leave_nothing(monkeypatch):
    async with running(1) as cluster, cluster.client() as client:
        monkeypatch.setattr(client._uploads, "add", lambda images: None)
        rollout = await client.submit(PROMPTS[:3], n=1, sampling=SAMPLING)
        buffer = cluster.services["buffer"]
        await eventually(lambda: len(buffer.machine.registry.held) == 3)
        await rollout.cancel()
        await eventually(lambda: not buffer.machine.groups)
        assert not buffer._images.machine._groups
        assert not buffer._images.machine._waiting
