"""Who copies a stream of weights from whom."""

import orders
import pytest

from seer.common import wire
from seer.services.buffer.events import Left, Weights
from seer.services.buffer.weights.fan_out import FAN_OUT, SPARE, FanOut
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
    machine.apply(orders.loaded("a", 1, "no room"), 2.0, idle=True)
    for name in "bc":
        machine.apply(orders.loaded(name, 1), 2.0, idle=True)
    assert machine._fan_out._orders == {STREAM: ["b", "c"]}
    machine.apply(orders.update("t", 2, "spool:v2", "d2"), 3.0, idle=True)
    machine.apply(orders.prepared("b", 2, "", "no room", 2), 3.0, idle=True)
    assert machine._fan_out._orders == {STREAM: ["b", "c"]}
    machine.apply(orders.update("t", 3, "/folder", "d3"), 4.0, idle=True)
    for name in "bc":
        machine.apply(orders.prepared(name, 3, "d3", call_id=3), 4.0, idle=True)
    assert machine.live.version == 3
    assert not machine._fan_out._orders
    assert not machine._fan_out._whole
    machine.apply(Left(["a", "b", "c"]), 4.0, idle=True)
    assert not machine._fan_out._places


def test_who_joins_later_copies_from_engines_that_have_the_live_weights_also_of_a_restarted_buffer():
    machine = WeightsMachine(seconds=10.0)
    for name, digest in (("a", "d1"), ("b", "d1"), ("c", "d1"), ("d", "other")):
        live = Weights(1, digest, STREAM)
        joined = orders.joined(name, weights=live, node=f"n{name}", weights_endpoint=f"at {name}")
        machine.apply(joined, 0.0, idle=True)
    new = orders.joined("e", weights=Weights(0, "d0"), node="ne", weights_endpoint="at e")
    (order,) = orders.pick(machine.apply(new, 1.0, idle=True), wire.LoadWeights)
    assert order.holders[0] in ("at a", "at b")  # d has no copy, and is told to load, too
    assert set(order.holders) <= {"at a", "at b", "at c"}


def test_later_joiners_go_on_with_the_tree_and_may_ask_some_more():
    plan, _ = tree(*"abcdefgh")
    for name in "abcdefgh":
        plan.has(name, STREAM)
    first = []
    for number in range(8):
        plan.joined(f"j{number}", f"nj{number}", f"at j{number}")
        holders = plan.holders(f"j{number}", STREAM)
        first.append(holders[0])
        assert len(set(holders)) == len(holders) <= wire.MAX_HOLDERS
        assert sum(each[3:] in "abcdefgh" for each in holders) >= 1 + SPARE
    assert max(map(first.count, first)) <= FAN_OUT
    asked = set()
    for _ in range(8):  # one that fails, and tries again
        plan.ended("j7", STREAM)
        asked |= {*plan.holders("j7", STREAM)}
    assert {f"at {name}" for name in "abcdefgh"} <= asked
    plan.ended("d", STREAM)
    plan.left("e")
    assert plan._whole == {STREAM: set("abcfgh")}
    plan.keep({"spool:v2"})
    assert (plan._orders, plan._whole) == ({}, {})


def test_an_engine_alone_is_asked_by_all_who_join_however_many():
    plan = FanOut()
    plan.joined("a", "na", "at a")
    plan.has("a", STREAM)
    plan.has("nowhere", STREAM)
    plan.joined("f", "nf", "at f")
    plan.has("f", "/folder")
    assert plan._orders == {STREAM: ["a"]}
    for name in "bcde":
        plan.joined(name, f"n{name}", f"at {name}")
        assert "at a" in plan.holders(name, STREAM)
