"""Where `divided` places a request, on any fleet: room first, then the cached prefix, then balance."""

from hypothesis import given
from hypothesis import strategies as st

from seer.common.policy.fleet import Fleet, InstanceView
from seer.common.policy.placement import BALANCE_SPREAD
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import POLICIES
from seer.common.types import Capacity

place = POLICIES["divided"].place
CAPACITY = Capacity(kv_blocks=40, block_size=16, max_num_seqs=8, max_model_len=600, draft_tokens=2)
INSTANCES = st.lists(
    st.builds(
        InstanceView,
        st.sampled_from("abcdef"),
        st.just(CAPACITY),
        chunks=st.integers(0, 8),
        reserved_blocks=st.integers(0, 40),
        pinned_blocks=st.sampled_from((0, 0, 3)),
    ),
    unique_by=lambda view: view.name,
)
REQUESTS = st.builds(
    RequestView,
    st.just("r/p#0"),
    st.just(0),
    st.just(0),
    prompt_len=st.integers(1, 300),
    max_tokens=st.just(400),
    generated=st.integers(0, 200),
    last_instance=st.sampled_from(("", *"abcdefg")),
)


@given(INSTANCES, REQUESTS, st.integers(1, 200))
def test_room_first_then_prefix_then_balance(views, request, chunk):
    name = place(request, chunk, Fleet(views))
    room = {view.name: view for view in views if view.has_room(request.context, chunk)}
    assert (name is None) == (not room), "it waits only if it fits nowhere"
    if name is None:
        return
    assert room[name].free_blocks >= CAPACITY.blocks_for(request.context, chunk)
    assert room[name].chunks < CAPACITY.max_num_seqs
    least = min(view.chunks for view in room.values())
    home = room.get(request.last_instance)
    if home is not None and home.chunks - least <= BALANCE_SPREAD:
        assert name == home.name, "nothing is gained by moving"
    else:
        assert room[name].chunks == least


@given(INSTANCES, REQUESTS, st.integers(1, 200), st.randoms(use_true_random=False))
def test_the_order_in_which_instances_joined_does_not_matter(views, request, chunk, random):
    shuffled = list(views)
    random.shuffle(shuffled)
    assert place(request, chunk, Fleet(shuffled)) == place(request, chunk, Fleet(views))
