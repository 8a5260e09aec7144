"""The tree of copies under any order of engines that join, fetch, end and leave."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from seer.services.buffer.weights.fan_out import FAN_OUT, SIBLINGS, SPARE, FanOut

STREAM = "spool:v1"
NAMES = [f"e{number}" for number in range(24)]
STEPS = st.lists(
    st.tuples(st.sampled_from(("fetch", "load", "end", "leave")), st.sampled_from(NAMES), st.integers(0, 7))
)


@given(STEPS)
def test_nobody_waits_for_one_that_waits_for_it(steps):
    plan, order, nodes, whole = FanOut(), [], {}, set()
    for what, name, node in steps:
        if what == "fetch":
            if name not in order:
                plan.left(name)
                nodes[name] = f"n{node}"
                plan.joined(name, nodes[name], name)
                order.append(name)
            holders = plan.holders(name, STREAM)
            assert all(order.index(each) < order.index(name) for each in holders)
            assert len(set(holders)) == len(holders)
            assert sum(nodes[each] == nodes[name] and each not in whole for each in holders) <= SIBLINGS
            earlier = whole.intersection(order[: order.index(name)])
            assert len({nodes[each] for each in holders} & {nodes[each] for each in earlier}) >= min(
                SPARE, len({nodes[each] for each in earlier})
            )
        elif name in order and what == "load":
            whole.add(name)
            plan.has(name, STREAM)
        elif name in order:
            order.remove(name)
            whole.discard(name)
            plan.ended(name, STREAM) if what == "end" else plan.left(name)
    assert list(plan._orders.values()) == ([order] if order else [])


@given(st.lists(st.integers(0, 11), min_size=1, max_size=40))
def test_nobody_feeds_more_nodes_than_it_may(nodes):
    plan = FanOut()
    feeds, served = Counter(), set()
    for number, node in enumerate(nodes):
        plan.joined(f"e{number}", f"n{node}", f"e{number}")
        holders = plan.holders(f"e{number}", STREAM)
        if node not in served:  # the first of its node: the others have it as their first holder
            served.add(node)
            feeds[holders[0] if holders else "the buffer"] += 1
        else:
            assert f"n{node}" == f"n{nodes[int(holders[0][1:])]}"
    assert max(feeds.values()) <= FAN_OUT
