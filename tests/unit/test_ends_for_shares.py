"""Chunks that end where they stand, so that another trainer has its share of the engines at once."""

import orders
import pytest
from buffer_events import end, make, pick, submit
from invariants import check

from seer.common import wire
from seer.common.policy.shares import UNIT
from seer.common.types import Capacity
from seer.services.buffer.events import Tick
from seer.services.buffer.requests import events
from seer.services.buffer.requests.holdings import Holdings
from seer.services.buffer.requests.instructions import Dispatch
from seer.services.buffer.requests.state import Limits


def flooded(**limits):
    """Return a machine whose 16 seats trainer `t` has, and more to run, and what it dispatched."""
    machine = make(chunk_size=8, **limits)
    dispatches = pick(submit(machine, *(f"p{i}" for i in range(30)), n=1, max_tokens=24), Dispatch)
    assert len(dispatches) == 16
    return machine, {dispatch.request_id: dispatch for dispatch in dispatches}


def ended_for(out):
    return [name for order in pick(out, wire.EndChunks) for name in order.request_ids]


@pytest.mark.parametrize(("waiting", "weights", "ended"), [(20, {}, 8), (3, {}, 3), (20, {"u": 3.0}, 12)])
def test_chunks_end_where_they_stand_for_a_trainer_that_lacks_its_share(waiting, weights, ended):
    machine, running = flooded(shares=weights)
    out = submit(machine, *(f"q{i}" for i in range(waiting)), n=1, trainer="u", rollout="u", max_tokens=24)
    names = ended_for(out)
    assert len(names) == len(set(names)) == ended
    assert {running[name].instance for name in names} == {"a", "b"}
    assert not ended_for(machine.apply(Tick(), 1.0)), "once is enough"
    after = []
    for name in names:
        out = end(machine, running[name], count=3)
        assert machine.requests[name].view.generated == 3
        after += [dispatch.request_id for dispatch in pick(out, Dispatch)]
        assert not ended_for(out)
    assert [name[0] for name in after] == ["u"] * ended
    assert not machine.scheduler.ending


def test_no_chunk_ends_early_for_a_trainer_that_has_half_of_its_share():
    machine, running = flooded()
    for name in list(running)[:4]:
        end(machine, running[name], finish="stop")
    first = submit(machine, *(f"q{i}" for i in range(4)), n=1, trainer="u", rollout="u", max_tokens=24)
    assert len(ended_for(first)) == 4
    for name in ended_for(first):
        end(machine, running.get(name) or pick_running(machine, name), count=1)
    assert not ended_for(submit(machine, "more", n=1, trainer="u", rollout="u", max_tokens=24))


def pick_running(machine, name):
    request = machine.requests[name]
    return Dispatch(request.instance, name, request.attempt, 8, [], False)


def test_a_streamed_chunk_may_end_with_nothing_new():
    machine = make(chunk_size=8)
    specs = [events.GroupSpec("p", 10, stream=True)]
    (dispatch,) = pick(machine.apply(events.GroupsSubmitted("t", "r", 1, 24, specs), 0.0), Dispatch)
    tokens = wire.ChunkTokens(dispatch.request_id, dispatch.attempt, 3, 0)
    machine.apply(events.TokensArrived("a", tokens), 1.0)
    result = wire.ChunkResult(dispatch.request_id, dispatch.attempt, 0, "", "", 0, start=3)
    (again,) = pick(machine.apply(events.ChunkEnded(dispatch.instance, result), 1.0), Dispatch)
    assert machine.requests[dispatch.request_id].losses == 0
    assert again.max_new_tokens == 8
    check(machine)


def test_a_trainer_ends_nobodys_chunks_for_room_that_its_own_chunks_take():
    wide = Capacity(kv_blocks=40, block_size=16, max_num_seqs=8, max_model_len=640)
    machine = make(engines=("a", "b"), chunk_size=8)
    machine.apply(orders.joined("wide", wide), 0.0)
    mine = pick(submit(machine, "p", n=1, prompt_len=500, max_tokens=100, trainer="w"), Dispatch)
    assert [dispatch.instance for dispatch in mine] == ["wide"]
    submit(machine, *(f"q{i}" for i in range(40)), n=1, trainer="u", rollout="u", max_tokens=24)
    out = submit(machine, "more", n=1, prompt_len=500, max_tokens=100, trainer="w", rollout="w")
    assert not ended_for(out)


def test_no_trainer_is_ended_that_would_be_first_then():
    machine, _ = flooded()
    shares = machine.scheduler.queue.shares
    submit(machine, *(f"q{i}" for i in range(20)), n=1, trainer="u", rollout="u", max_tokens=24)
    shares._of["u"].had = 1e9  # it had far more than its part
    shares._of["u"].waits = True
    assert not shares.beyond("u", 2 * UNIT, {})
    shares._of["u"].had = 0.0
    assert shares.beyond("u", 2 * UNIT, {}) == {"t": UNIT}
    assert shares.beyond("u", 2 * UNIT, {"t": UNIT // 2}) == {"t": UNIT // 2}


def test_a_restored_machine_drops_the_same_of_two_that_have_as_much():
    holdings = [Holdings(Limits(None)), Holdings(Limits(None))]
    for made, names in zip(holdings, ("uv", "vu"), strict=True):
        for name in names:
            made.add(name, requests=1, tokens=5, results=7)
    assert len({made.most_tokens() for made in holdings}) == 1
    assert len({made.most_results(("u", 0)) for made in holdings}) == 1
