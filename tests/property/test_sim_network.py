"""What `sim/network.py` promises, for any transfers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_parts import Clock

from seer.sim.network import Network

NODES = 3
transfers = st.lists(
    st.tuples(
        st.sampled_from(["fetch", "save"]), st.integers(0, NODES - 1), st.floats(0, 10), st.floats(0, 30)
    ),
    min_size=1,
    max_size=12,
)


def run(ordered):
    """Return when each transfer (kind, node, seconds of a link, when it was ordered) was done."""
    clock, done = Clock(), [[] for _ in ordered]
    network = Network(NODES, clock.wake)

    def start(place, kind, node, seconds):
        getattr(network, kind)(node, seconds, clock.now, done[place].append)

    for place, (kind, node, seconds, at) in enumerate(ordered):
        clock.at(at, lambda given=(place, kind, node, seconds): start(*given))
    clock.until(math.inf)
    return done


@given(transfers)
def test_each_is_done_once_when_its_links_have_carried_it_and_again_the_same(ordered):
    done = run(ordered)
    assert run(ordered) == done
    for (_, _, seconds, at), times in zip(ordered, done, strict=True):
        assert len(times) == 1
        assert times[0] >= at + seconds - 1e-6
        assert times[0] <= max(each[3] for each in ordered) + sum(each[2] for each in ordered) + 1e-6


@given(st.integers(1, 8), st.floats(0.1, 10))
def test_equal_fetches_to_a_node_share_its_link(several, seconds):
    done = run([("fetch", 1, seconds, 0.0)] * several)
    assert [times[0] for times in done] == pytest.approx([several * seconds] * several)


def test_who_comes_later_shares_from_then_on():
    # One has 2 s alone, then half the link: its other 2 s take 4. The second then ends alone.
    done = run([("fetch", 0, 4.0, 0.0), ("fetch", 0, 3.0, 2.0)])
    assert [times[0] for times in done] == pytest.approx([6.0, 7.0])


def test_nodes_have_links_of_their_own_and_both_directions_go_on_at_once():
    done = run([("fetch", node, 3.0, 0.0) for node in range(NODES)])
    assert [times[0] for times in done] == pytest.approx([3.0] * NODES)
    # Saves of one node share its outgoing link, wherever they go; those of several meet at one place at most.
    done = run([("save", 0, 1.0, 0.0)] * NODES)
    assert [times[0] for times in done] == pytest.approx([3.0] * NODES)
    done = run([("save", node, 1.0, 0.0) for node in range(NODES)])
    assert [times[0] for times in done] == pytest.approx([1.0] * NODES)


def test_a_fetch_waits_for_the_nodes_that_have_its_blocks():
    # Each outgoing link gives a third of the fetch; that of node 0 shares it with the save.
    done = run([("fetch", 1, 3.0, 0.0), ("save", 0, 9.0, 0.0)])
    assert done[1][0] == pytest.approx(10.0)
    alone = run([("save", 0, 9.0, 0.0)])
    assert alone[0][0] == pytest.approx(9.0)
