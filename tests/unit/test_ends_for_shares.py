"""Chunks that end where they stand, so that another trainer has its share of the engines at once."""

import pytest
from buffer_events import end, make, pick, submit
from invariants import check

from seer.common import wire
from seer.services.buffer.events import Tick
from seer.services.buffer.requests import events
from seer.services.buffer.requests.instructions import Dispatch


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
    assert machine.scheduler.ending == 0


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
