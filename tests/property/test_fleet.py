"""The fleet's arrays say what looking at every instance would say."""

from hypothesis import given, settings
from hypothesis import strategies as st

from seer.common.policy.fleet import SPARE_PART, Fleet, InstanceView
from seer.common.policy.ranks import RankPlacement
from seer.common.types import Capacity

SIZE = 49
NAMES = tuple(f"e{number:02}" for number in range(SIZE))
CAPACITIES = [
    Capacity(
        kv_blocks=blocks,
        block_size=16,
        max_num_seqs=seqs,
        max_model_len=length,
        draft_tokens=drafts,
        image_tokens=image,
        parts=parts,
    )
    for blocks, seqs, length, drafts, image, parts in (
        (8, 3, 100, 0, 0, 1),
        (20, 2, 400, 4, 9, 1),
        (20, 4, 60, 0, 30, 2),
        (12, 4, 400, 0, 0, 3),
    )
]
CLAIMS = {7: -1, 8: -(2**63) - 1, 9: 2**64 - 1}
"""Blocks that an engine claims to be pinned, and that cannot be."""
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("join", "leave", "reserve", "release", "pin")),
        st.sampled_from(NAMES),
        st.integers(0, 9),
    ),
    max_size=60,
)


Held = dict[str, dict[str, int]]
"""Blocks by instance and request."""


def apply(fleet: Fleet, held: Held, what: str, name: str, number: int) -> None:
    if what == "join" and name not in fleet:
        fleet.add(InstanceView(name, CAPACITIES[number % len(CAPACITIES)]))
        held[name] = {}
    elif name not in fleet:
        return
    elif what == "leave":
        fleet.remove(name)
        del held[name]
    elif what == "reserve":
        request = f"r{number}"
        if request not in held[name]:
            fleet.reserve(name, number, request)
            held[name][request] = number
    elif what == "release" and held[name]:
        request, blocks = held[name].popitem()
        fleet.release(name, blocks, request)
    elif what == "pin":
        fleet.pin(name, CLAIMS.get(number, number))
        assert 0 <= fleet[name].pinned_blocks <= fleet[name].capacity.kv_blocks


def first_by_load(views: list[InstanceView]) -> InstanceView | None:
    return min(views, key=lambda view: (view.chunks, -view.free_blocks, view.name), default=None)


def blocks_with_spare(view: InstanceView, context: int, chunk: int, spare: int) -> int:
    capacity = view.capacity
    more = min(spare // capacity.block_size, capacity.kv_blocks // capacity.parts // SPARE_PART)
    return capacity.blocks_for(context, chunk) + more


def check(fleet: Fleet, context: int, chunk: int, image: int) -> None:
    able = [view for view in fleet.values() if view.capacity.holds(context, chunk, image)]
    assert all(view.capacity.image_tokens >= image for view in able)
    assert list(fleet.holding(context, chunk, image)) == [view.name for view in able]
    room = [view for view in fleet.values() if view.has_room(context, chunk, image)]
    assert all(view in able for view in room)
    named = [name for name in NAMES if fleet.has_room(name, context, chunk, image)]
    assert named == [view.name for view in room]
    assert fleet.emptiest(context, chunk, 0, image) is first_by_load(room)
    for spare in (1, 64, 10**6):
        roomy = [view for view in room if view.room >= blocks_with_spare(view, context, chunk, spare)]
        found = first_by_load(roomy) or first_by_load([view for view in room if not view.chunks])
        assert fleet.emptiest(context, chunk, spare, image) is found
    seats = [view for view in able if view.chunks < view.capacity.max_num_seqs]
    assert fleet.least_loaded(context, chunk, image) is first_by_load(seats)


@settings(max_examples=150)
@given(st.sampled_from((0, 3, 16, SIZE)), st.sampled_from((1, 3)), CHANGES, st.data())
def test_the_fleet_answers_as_a_scan_would(joined, kinds, changes, data):
    fleet, held = Fleet(), {}
    for number in range(joined):
        apply(fleet, held, "join", NAMES[number], number % kinds)
    for change in changes:
        apply(fleet, held, *change)
    assert list(fleet) == list(fleet.names) == sorted(held)
    assert fleet.chunks == sum(map(len, held.values()))
    for name, blocks in held.items():
        assert (fleet[name].chunks, fleet[name].reserved_blocks) == (len(blocks), sum(blocks.values()))
    for _ in range(3):
        image = data.draw(st.sampled_from((0, 1, 9, 10, 31)))
        check(fleet, data.draw(st.integers(1, 300)), data.draw(st.integers(1, 100)), image)


@settings(max_examples=50)
@given(st.integers(0, 14), st.randoms(use_true_random=False))
def test_the_few_with_room_in_a_full_fleet_are_found(free, random):
    fleet = Fleet(InstanceView(name, CAPACITIES[number % 2]) for number, name in enumerate(NAMES))
    lucky = random.sample(NAMES, free)
    for name in NAMES:
        blocks = fleet[name].capacity.kv_blocks
        fleet.reserve(name, blocks - random.randint(2, 5) if name in lucky else blocks, "r#0")
    for chunk in (1, 16, 40):
        for image in (0, 5):
            check(fleet, 16, chunk, image)


@given(
    st.integers(2, 5),
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 200), st.integers(1, 60)), max_size=80
    ),
)
def test_what_is_sent_to_data_parallel_ranks_fits_one_and_what_is_not_fits_none(parts, orders):
    capacity = Capacity(
        kv_blocks=parts * 20, block_size=16, max_num_seqs=parts * 2, max_model_len=300, parts=parts
    )
    fleet, engine = Fleet([InstanceView("e", capacity)]), RankPlacement.of(parts, 20, 2)
    running: dict[str, tuple[int, int]] = {}
    for starts, number, context, chunk in orders:
        name, blocks = f"r{number}", capacity.blocks_for(context, chunk)
        if not starts and name in running:
            rank, blocks = running.pop(name)
            engine.end(rank, blocks)
            fleet.release("e", blocks, name)
        elif starts and name not in running:
            fits = engine.room >= blocks
            assert fleet.has_room("e", context, chunk) == fits == (fleet.emptiest(context, chunk) is not None)
            if fits:
                rank = engine.place(name, blocks)
                assert engine.free[rank] >= 0, "it begins at once"
                assert engine.chunks[rank] <= 2
                running[name] = rank, blocks
                fleet.reserve("e", blocks, name)
    assert fleet["e"].reserved_blocks == sum(blocks for _, blocks in running.values())
