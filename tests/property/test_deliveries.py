"""Any order of events: the invariants that the module lists, held by a model of who has what."""

from hypothesis import given
from hypothesis import strategies as st

from seer.services.buffer.requests import deliveries
from seer.services.buffer.requests.deliveries import Deliveries

LIVES = (b"t", b"u")
GROUPS = ("a", "b", "c", "d", "e")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(LIVES), st.sampled_from(GROUPS), st.integers(1, 150)),
        st.tuples(st.just("forget"), st.sampled_from(GROUPS)),
        st.tuples(st.just("reset"), st.sampled_from(LIVES)),
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
    waiting: dict[bytes, dict[str, int]] = {life: {} for life in LIVES}
    sent: dict[bytes, dict[str, int]] = {life: {} for life in LIVES}

    def gone(group):
        for life in LIVES:
            waiting[life].pop(group, None)
            sent[life].pop(group, None)

    for event in events:
        ready = []
        match event:
            case ("add", life, group, size):
                gone(group)
                waiting[life][group] = size
                ready = machine.add(life, group, size)
            case ("forget", group):
                gone(group)
                ready = machine.forget(group)
            case ("reset", life):
                machine.reset(life)
                waiting[life].clear()
                sent[life].clear()
        for life, group in ready:
            assert group == next(iter(waiting[life]))
            sent[life][group] = waiting[life].pop(group)
        for life in LIVES:
            total = sum(sent[life].values())
            assert total <= 100 or len(sent[life]) == 1
            if waiting[life]:
                assert sent[life]
                assert total + next(iter(waiting[life].values())) > 100
    for life in LIVES:
        for group in [*sent[life], *waiting[life]]:
            machine.forget(group)
    assert not machine._owner
    assert not machine._windows
