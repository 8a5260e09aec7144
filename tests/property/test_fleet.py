"""The fleet's indices say what looking at every instance would say."""

from hypothesis import given, settings
from hypothesis import strategies as st

from seer.common.policy.fleet import Fleet, InstanceView
from seer.common.types import Capacity

NAMES = ("a", "b", "c", "d")
CAPACITIES = [
    Capacity(kv_blocks=blocks, block_size=16, max_num_seqs=seqs, max_model_len=length, draft_tokens=drafts)
    for blocks, seqs, length, drafts in ((8, 3, 100, 0), (20, 2, 400, 4), (20, 4, 60, 0))
]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("join", "leave", "reserve", "release", "pin")),
        st.sampled_from(NAMES),
        st.integers(0, 9),
    ),
    max_size=60,
)


def apply(fleet: Fleet, held: dict[str, list[int]], what: str, name: str, number: int) -> None:
    if what == "join" and name not in fleet:
        fleet.add(InstanceView(name, CAPACITIES[number % len(CAPACITIES)]))
        held[name] = []
    elif name not in fleet:
        return
    elif what == "leave":
        fleet.remove(name)
        del held[name]
    elif what == "reserve":
        fleet.reserve(name, number)
        held[name].append(number)
    elif what == "release" and held[name]:
        fleet.release(name, held[name].pop())
    elif what == "pin":
        fleet.pin(name, number)


@settings(max_examples=300)
@given(CHANGES, st.integers(1, 300), st.integers(1, 100))
def test_the_fleet_answers_as_a_scan_would(changes, context, chunk):
    fleet, held = Fleet(), {}
    for change in changes:
        apply(fleet, held, *change)
    assert list(fleet) == list(fleet.names) == sorted(held)
    assert fleet.chunks == sum(map(len, held.values()))
    for name, blocks in held.items():
        assert (fleet[name].chunks, fleet[name].reserved_blocks) == (len(blocks), sum(blocks))
    holding = [name for name in fleet if fleet[name].capacity.holds(context, chunk)]
    assert list(fleet.holding(context, chunk)) == holding
    room = [view for view in fleet.values() if view.has_room(context, chunk)]
    assert [name for name in NAMES if fleet.has_room(name, context, chunk)] == [view.name for view in room]
    best = min(room, key=lambda view: (view.chunks, -view.free_blocks, view.name), default=None)
    assert fleet.emptiest(context, chunk) is best
