"""Who copies a stream of weights from whom."""

import orders
import pytest

from seer.common import wire
from seer.services.buffer.events import Left, Weights
from seer.services.buffer.weights.fan_out import FanOut
from seer.services.buffer.weights.weights_machine import WeightsMachine

STREAM = "spool:v1"


def tree(*names, nodes=None):
    """Have engines join, each on a node of its own, and fetch in turn; return their holders by name."""
    plan = FanOut()
    for name in names:
        plan.joined(name, (nodes or {}).get(name, f"n{name}"), f"at {name}")
    return plan, {name: plan.holders(name, STREAM) for name in names}


def test_two_nodes_are_fed_by_the_buffer_and_two_by_each_node():
    _, holders = tree(*"abcdefgh")
    assert {name: each[:1] for name, each in holders.items()} == {
        "a": (), "b": (), "c": ("at a",), "d": ("at a",), "e": ("at b",), "f": ("at b",), "g": ("at c",), "h": ("at c",)
    }  # fmt: skip
    assert holders["h"] == ("at c", "at a")  # who is lost is passed over


def test_one_engine_of_a_node_fetches_and_the_others_take_its_copy():
    nodes = dict.fromkeys("abc", "n1") | dict.fromkeys("def", "n2") | dict.fromkeys("ghi", "n3")
    _, holders = tree(*"abcdefghi", nodes=nodes)
    assert (holders["a"], holders["d"], holders["g"]) == ((), (), ("at a",))
    assert (holders["b"], holders["c"]) == (("at a",), ("at a", "at b"))
    assert holders["i"] == ("at g", "at h", "at a")


def test_the_same_question_has_the_same_answer():
    plan, holders = tree(*"abcdef")
    assert {name: plan.holders(name, STREAM) for name in "abcdef"} == holders


def test_who_left_or_has_no_copy_any_more_holds_nothing():
    plan, _ = tree(*"abc")
    plan.left("a")
    plan.ended("b", STREAM)
    plan.joined("d", "nd", "at d")
    assert plan.holders("c", STREAM) == ()
    assert plan.holders("d", STREAM) == ()
    for name in "cd":
        plan.ended(name, STREAM)
    assert not plan._orders


@pytest.mark.parametrize("source", ["/folder", "lora::/folder", 'mooncake:{"name":"v1"}'])
def test_only_streams_in_the_spool_are_copied(source):
    plan, _ = tree(*"abc")
    assert plan.holders("c", source) == ()
    assert plan.holders("c", "lora:d0:spool:v2") == ()
    assert plan._orders.keys() == {STREAM, "lora:d0:spool:v2"}


def test_an_engine_that_says_no_endpoint_or_node_takes_no_part():
    plan, _ = tree("a", "b")
    plan.joined("old", "", "")
    plan.joined("here", "the buffer's", "")
    plan.joined("c", "nc", "at c")
    assert [plan.holders(name, STREAM) for name in ("old", "here", "c")] == [(), (), ("at a",)]


def test_the_machine_says_it_with_each_order_and_forgets_it_in_the_end():
    machine = WeightsMachine(seconds=10.0)
    for name in "abc":
        joined = orders.joined(name, weights=Weights(0, "d0"), node=f"n{name}", weights_endpoint=f"at {name}")
        machine.apply(joined, 0.0, idle=True)
    out = machine.apply(orders.update("t", 1, STREAM, "d1"), 0.0, idle=True)
    assert out[1:] == [
        orders.prepare(name, 1, STREAM, 1, "d1", ("at a",) if name == "c" else ()) for name in "abc"
    ]
    out = [item for name in "abc" for item in machine.apply(orders.prepared(name, 1, "d1"), 1.0, idle=True)]
    assert [order.holders for order in orders.pick(out, wire.LoadWeights)] == [[], [], ["at a"]]
    for name in "abc":
        machine.apply(orders.loaded(name, 1), 2.0, idle=True)
    assert not machine._fan_out._orders
    machine.apply(orders.update("t", 2, "spool:v2", "d2"), 3.0, idle=True)
    machine.apply(orders.prepared("a", 2, "", "no room", 2), 3.0, idle=True)
    assert not machine._fan_out._orders
    machine.apply(Left(["a", "b", "c"]), 4.0, idle=True)
    assert not machine._fan_out._places
