"""What a connection to a dgds makes of its answers, and what it keeps to send again."""

import asyncio

import numpy as np
from dgds_system import GROUP, system
from virtual_time import VIRTUAL

from seer.common import wire
from seer.services.dgds.connection import OPEN_SECONDS, SHARE
from seer.services.dgds.packing import group_digest, pack
from seer.services.dgds.resend_buffer import OVERHEAD_TOKENS, ResendBuffer

pytestmark = VIRTUAL

KEY, OTHER, THIRD = (1, 0), (1, 1), (1, 2)


def take(client, revision, previous, *tokens, missing=()):
    """Have an answer come; return what of it is told."""
    (connection,) = client._connections
    group = group_digest(GROUP)
    connection._names[group] = GROUP
    deltas = [wire.Delta(group, 0, revision, previous, len(tokens))] if tokens else []
    connection._add_deltas(
        wire.Deltas(
            deltas=deltas, tokens=pack(np.array(tokens, np.int32)), call_id=0, done=0,
            missing=[group] if missing else [],
        )
    )  # fmt: skip
    deltas, connection._deltas = connection._deltas, []
    return [(delta.previous, delta.tokens.tolist()) for delta in deltas]


async def test_an_answer_tells_what_is_new_in_it_and_follows_what_is_known():
    async with system(started=False) as it:
        client = it.client()
        assert take(client, 1, 0, 1, 2, 3) == [(0, [1, 2, 3])]
        assert take(client, 1, 0, 1, 2, 3) == []
        assert take(client, 1, 1, 2, 3, 4, 5) == [(3, [4, 5])]
        assert take(client, 1, 9, 7) == [], "it does not follow"
        assert take(client, 2, 2, 9) == [(2, [9])], "cut, and told from there"
        assert take(client, 1, 3, 4) == [], "of before the cut"
        assert take(client, 1, 0, missing=True) == []
        assert take(client, 1, 0, 5) == [(0, [5])], "a group that was lost begins anew"


async def test_a_welcome_of_the_same_incarnation_changes_nothing():
    async with system() as it:
        client = it.client()
        await asyncio.sleep(1)
        for _ in range(2):
            await it.kill()
            await it.start()
            await asyncio.sleep(10)
        (connection,) = client._connections
        take(client, 1, 0, 1)
        connection._welcomed(connection._channel.peer)
        assert connection._fetched


async def test_a_dgds_that_never_came_is_not_waited_for():
    async with system(started=False) as it:
        client = it.client()
        await asyncio.sleep(OPEN_SECONDS / 2)
        before = asyncio.get_running_loop().time()
        assert await client.fetch([GROUP]) == []
        assert asyncio.get_running_loop().time() == before


async def test_flushes_that_take_long_come_seldom():
    async with system() as it:
        client = it.client(flush_seconds=0.0)
        await asyncio.sleep(1)
        (connection,) = client._connections
        flushes, flush = [], connection._flush

        async def slowly() -> None:
            flushes.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.004)
            await flush()

        connection._flush = slowly
        for place in range(400):
            connection.outputs.append(KEY, 1, place, [1])
            connection.changed()
            await asyncio.sleep(0.005)
        assert 0.5 < len(flushes) * 0.004 / (2 * SHARE) <= 1.1, "at most that share of two seconds"


def sent(outputs):
    return [(part.key, part.previous, part.tokens.tolist()) for part in outputs.batch(100)]


def test_what_cannot_be_filled_is_given_up_until_the_dgds_is_another():
    outputs = ResendBuffer(1000)
    outputs.append(KEY, 1, 5, [1])
    assert sent(outputs) == [(KEY, 5, [1])]
    outputs.rewind(KEY, 1, 0, 1.0)
    outputs.append(KEY, 1, 6, [2])
    assert not outputs.unsent
    outputs.rewind_all()
    outputs.append(KEY, 1, 7, [3])
    assert sent(outputs) == [(KEY, 5, [1, 2, 3])]
    outputs.append(KEY, 1, 8, [4])
    assert sent(outputs) == [(KEY, 8, [4])]


def test_a_batch_has_no_more_parts_than_the_dgds_reads():
    outputs = ResendBuffer(10**8)
    for index in range(2 * 2**15 + 1):
        outputs.append((index, 0), 1, 0, [7])
    assert [len(outputs.batch(2**18)) for _ in range(4)] == [2**15, 2**15, 1, 0]


def test_the_response_that_was_not_added_to_for_longest_is_dropped():
    outputs = ResendBuffer(3 * OVERHEAD_TOKENS)
    for key, previous in ((KEY, 0), (OTHER, 0), (KEY, 1), (THIRD, 0)):
        outputs.append(key, 1, previous, [7])
    assert sorted(key for key, _, _ in sent(outputs)) == [KEY, THIRD]
