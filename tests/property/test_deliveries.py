"""Any order of events: the invariants that the module lists, held by a model of who has what."""

from hypothesis import given
from hypothesis import strategies as st

from seer.services.buffer.requests import deliveries
from seer.services.buffer.requests.deliveries import Deliveries

ADDRESSES = (b"t", b"u")
GROUPS = ("a", "b", "c", "d", "e")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(ADDRESSES), st.sampled_from(GROUPS), st.integers(1, 150)),
        st.tuples(st.just("forget"), st.sampled_from(GROUPS)),
        st.tuples(st.just("reset"), st.sampled_from(ADDRESSES)),
    ),
    max_size=40,
)


@given(EVENTS)
def test_windows(events):
    deliveries.WINDOW_BYTES, before = 100, deliveries.WINDOW_BYTES
    try:
        _play(events)
    finally:
        deliveries.WINDOW_BYTES = before


def _play(events):
    machine = Deliveries()
    waiting: dict[bytes, dict[str, int]] = {address: {} for address in ADDRESSES}
    sent: dict[bytes, dict[str, int]] = {address: {} for address in ADDRESSES}

    def gone(group):
        for address in ADDRESSES:
            waiting[address].pop(group, None)
            sent[address].pop(group, None)

    for event in events:
        ready = []
        match event:
            case ("add", address, group, size):
                gone(group)
                waiting[address][group] = size
                ready = machine.add(address, group, size)
            case ("forget", group):
                gone(group)
                ready = machine.forget(group)
            case ("reset", address):
                machine.reset(address)
                waiting[address].clear()
                sent[address].clear()
        for address, group in ready:
            assert group == next(iter(waiting[address]))
            sent[address][group] = waiting[address].pop(group)
        for address in ADDRESSES:
            total = sum(sent[address].values())
            assert total <= 100 or len(sent[address]) == 1
            if waiting[address]:
                assert sent[address]
                assert total + next(iter(waiting[address].values())) > 100
    for address in ADDRESSES:
        for group in [*sent[address], *waiting[address]]:
            machine.forget(group)
    assert not machine._owner
    assert not machine._windows
