"""What a client remembers of the noise that it has used, and the numbers that it gives."""

from __future__ import annotations

import numpy as np
import pytest
from fake_buffer import connect, connected, turns
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import VIRTUAL, virtual

from seer.client import InvalidField, Prompt, RolloutClient, SamplingParams
from seer.client.used_noise import ROLLOUTS_PER_VERSION, UsedNoise
from seer.common.types import TurnSpec
from seer.common.wire import Message, Refused, Submit

pytestmark = VIRTUAL

SAMPLING = SamplingParams(max_tokens=3)


def claim(noise: UsedNoise, group: str = "g", first: int = 0, n: int = 1, start: int = 4, **given: int):
    return noise.claim(
        given.get("seed", 0), given.get("number", 0), group, first, n, start, repeat=bool(given.get("repeat"))
    )


def test_what_begins_where_a_response_ended_has_noise_of_its_own():
    noise = UsedNoise()
    claim(noise, start=4).ended([5])
    with pytest.raises(InvalidField):
        claim(noise, start=8)
    late = claim(noise, start=9)
    with pytest.raises(InvalidField):
        claim(noise, start=2**20)  # nobody knows yet where it ends
    late.failed()
    claim(noise, start=9).ended([1])
    claim(noise, start=10)


def test_a_repetition_is_let_through_and_remembered():
    noise = UsedNoise()
    claim(noise, start=4, repeat=True).ended([5])
    with pytest.raises(InvalidField):
        claim(noise, start=4)
    claim(noise, start=9).ended([1])
    again = claim(noise, start=4, repeat=True)
    with pytest.raises(InvalidField):
        claim(noise, start=10)  # nobody knows yet where it ends
    again.ended([5])
    with pytest.raises(InvalidField):
        claim(noise, start=9)
    claim(noise, start=10)


def test_who_repeats_keeps_the_noise_from_others_and_none_gives_back_what_is_not_its_own():
    noise = UsedNoise()
    again = claim(noise, repeat=True)  # of what an earlier incarnation had
    with pytest.raises(InvalidField):
        claim(noise)
    again.failed()
    first = claim(noise)
    claim(noise, repeat=True).ended([5])
    first.failed()
    with pytest.raises(InvalidField):
        claim(noise)
    claim(noise, start=9).ended([1])
    assert not noise._under_way


def test_what_is_under_way_is_not_forgotten():
    noise = UsedNoise(most=1)
    claim(noise, "a")
    claim(noise, "b")
    with pytest.raises(InvalidField):
        claim(noise, "a")


def test_what_was_claimed_longest_ago_is_forgotten_first():
    noise = UsedNoise(most=2)
    for group in ("a", "b", "c"):
        claim(noise, group).ended([1])
    claim(noise, "a")
    with pytest.raises(InvalidField):
        claim(noise, "c")
    assert len(noise._ends) == 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 3), st.integers(0, 9), st.booleans()
        ),
        max_size=30,
    )
)
def test_no_position_of_a_response_is_claimed_twice(asked):
    noise, used = UsedNoise(), set()
    for group, first, n, start, fails in asked:
        lengths = [1 + (start + index) % 3 for index in range(n)]
        mine = {
            (group, first + index, start + at) for index, length in enumerate(lengths) for at in range(length)
        }
        try:
            held = claim(noise, group, first, n, start)
        except InvalidField:
            latest = {
                (name, index): max(p for g, i, p in used if (g, i) == (name, index))
                for name, index, _ in used
            }
            assert any(latest.get((group, first + index), -1) >= start for index in range(n))
            continue
        assert not mine & used
        if fails:
            held.failed()
        else:
            held.ended(lengths)
            used |= mine


@pytest.mark.parametrize("version", [-1, 0, 1, 7, 2**41, 2**63 - 1])
def test_default_numbers_rise_and_are_of_the_version(version):
    noise = UsedNoise()
    floor = max(version, 0) % 2**42 * ROLLOUTS_PER_VERSION
    for each in range(3):
        number = noise.number(None, version)
        assert number == floor + each < 2**63
        noise.took(number)
    assert noise.number(5, version) == 5
    noise.took(floor + 40)
    assert noise.number(None, version) == floor + 41


def test_no_number_is_above_the_largest():
    noise = UsedNoise()
    noise.took(2**63 - 1)
    with pytest.raises(
        InvalidField, match=r"rollout_number = 9223372036854775807: was given in this client's lifetime"
    ):
        noise.number(None, 3)
    assert noise.number(7, 3) == 7


# --- through a client ------------------------------------------------------------------------------


def generous(message: Message) -> list:
    return turns(message) if isinstance(message, Submit) and message.open else []


def refusing(message: Message) -> list:
    if not isinstance(message, Submit):
        return []
    names = {"prompt_ids": message.prompt_ids, "submission": message.submission}
    return [Refused(code="refused", message="no", rollout_id=message.rollout_id, **names)]


async def one(client: RolloutClient, rollout=None, **options: object) -> None:
    rollout = rollout or client.open_rollout(**options)
    await rollout.submit(Prompt("p.0", token_ids=[1, 2]), sampling=SAMPLING, group="p").result()


async def test_a_number_that_was_used_is_refused_before_anything_is_sent_or_said_to_be_repeated():
    async with connected() as (buffer, client):
        buffer.script = generous
        await one(client, rollout_number=7)
        before = len(buffer.of(Submit))
        with pytest.raises(InvalidField, match="rollout_number = 7: 'p' has had"):
            await one(client, rollout_number=7)
        rollout = client.open_rollout(rollout_number=7)
        with pytest.raises(InvalidField, match="rollout_number = 7"):
            await one(client, rollout)
        assert len(buffer.of(Submit)) == before
        await one(client, rollout_number=7, repeat=True)
        await one(client)
        assert [submit.rollout_number for submit in buffer.of(Submit)] == [7, 7, 8]


async def test_a_whole_rollout_is_refused_at_once_and_takes_nothing():
    async with connected() as (_, client):
        prompts = [Prompt("a", token_ids=[1]), Prompt("b", token_ids=[1])]
        first = await client.submit(prompts[1:], n=2, rollout_number=3)
        with pytest.raises(InvalidField, match="rollout_number = 3: 'b'"):
            await client.submit(prompts, n=2, rollout_number=3)
        await client.submit(prompts[:1], n=2, rollout_number=3)
        await first.cancel()
        await client.submit(prompts[1:], n=2, rollout_number=3)  # a retry
        again = await client.submit(prompts, n=2, rollout_number=3, repeat=True)
        assert again.rollout_number == 3


async def test_a_turn_that_failed_is_asked_for_again_and_its_trajectory_goes_on():
    async with connected() as (buffer, client):
        rollout = client.open_rollout()

        async def turn(number: int, length: int) -> None:
            prompt = Prompt(f"p#0.{number}", token_ids=np.ones(length, np.int32))
            spec = TurnSpec(2, length - 2, 90)
            await rollout.submit(prompt, sampling=SAMPLING, group="p", turn=spec).result()

        buffer.script = refusing
        with pytest.raises(Exception, match="no"):
            await turn(0, 2)
        buffer.script = generous
        await turn(0, 2)
        await turn(1, 5)
        with pytest.raises(InvalidField):  # its own answer is not in its context
            await turn(2, 7)
        await turn(2, 8)


async def test_numbers_are_of_the_weights_that_a_client_finds_and_sends():
    async with connected() as (buffer, client):
        assert (await client.submit([[1]])).rollout_number == 0
        client.weight_version = 2  # as after `update_weights`
        for place in range(2):
            assert (await client.submit([[1]])).rollout_number == 2 * ROLLOUTS_PER_VERSION + place
        assert client.open_rollout().rollout_number == 2 * ROLLOUTS_PER_VERSION + 2
        buffer.hub._weight_version = lambda: 2
        async with connect(buffer) as later:
            assert (await later.submit([[1]])).rollout_number == 2 * ROLLOUTS_PER_VERSION


INTS = ("n", "seed", "rollout_number", "weight_version")


async def submit(client: RolloutClient, **given: object) -> None:
    await client.submit([[1]], sampling=SAMPLING, **given)


async def open_rollout(client: RolloutClient, **given: object) -> None:
    client.open_rollout().submit([1], sampling=SAMPLING, **given)


async def open_numbered(client: RolloutClient, **given: object) -> None:
    client.open_rollout(**given).submit([1], sampling=SAMPLING)


async def trajectories(client: RolloutClient, **given: object) -> None:
    client.trajectories([[1]], sampling=SAMPLING, **({"max_context": 9} | given))


async def turn(client: RolloutClient, **given: object) -> None:
    spec = TurnSpec(**({"prompt_len": 1, "generated": 0, "cap": 8} | given))
    client.open_rollout().submit([1], sampling=SAMPLING, group="p", turn=spec)


async def update(client: RolloutClient, **given: object) -> None:
    await client.update_weights(source="folder", **given)


async def sleep(client: RolloutClient, **given: object) -> None:
    await client.sleep(**given)


DOORS = {
    submit: INTS, open_rollout: (*INTS, "first_index"), open_numbered: ("rollout_number",),
    trajectories: (*INTS, "max_context", "max_open"), turn: ("prompt_len", "generated", "cap"),
    update: ("version",), sleep: ("level",),
}  # fmt: skip


@pytest.mark.parametrize("value", [np.int64(2), 2.0, True, "2", None], ids=repr)
@pytest.mark.parametrize(
    ("door", "field"), [(door, field) for door, fields in DOORS.items() for field in fields]
)
def test_what_is_no_int_is_refused_before_anything_is_sent_or_claimed(door, field, value):
    if value is None and field in ("rollout_number", "weight_version"):
        return  # the default

    @virtual
    async def check():
        async with connected() as (buffer, client):
            buffer.script = generous
            with pytest.raises(InvalidField, match=rf"{field} = .*: is of type .*: give an int"):
                await door(client, **{field: value})
            assert not buffer.of(Submit)
            assert not client._noise._under_way

    check()
