import math
import random

import pytest

from seer.common.policy.fleet import SPARE_PART, Fleet, InstanceView
from seer.common.policy.length import Estimate
from seer.common.policy.placement import BALANCE_SPREAD, SPARE_CHUNKS
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import POLICIES, STAY, TAIL_PROBABILITY, length_quantile, oracle
from seer.common.types import Capacity

CAPACITY = Capacity(kv_blocks=10, block_size=16, max_num_seqs=4, max_model_len=4096)


def request(**fields) -> RequestView:
    return RequestView("r", fields.pop("group_number", 0), 0, 16, 64, **fields)


def test_static_keeps_groups_together_and_ignores_room():
    static = POLICIES["static"]
    full = Fleet(InstanceView(name, CAPACITY, chunks=99, reserved_blocks=10) for name in ("a", "b", "c"))
    assert [static.place(request(group_number=g), 64, full) for g in range(4)] == ["a", "b", "c", "a"]
    assert static.chunk(request(), 8) == 64
    assert static.place(request(), 64, Fleet()) is None


def test_divided_stays_with_its_prefix_until_balance_matters():
    divided = POLICIES["divided"]
    roomy = Capacity(kv_blocks=1000, block_size=16, max_num_seqs=400, max_model_len=4096)
    fleet = Fleet([InstanceView("home", roomy, chunks=BALANCE_SPREAD), InstanceView("other", roomy)])
    assert divided.place(request(last_instance="home"), 16, fleet) == "home"
    fleet.reserve("home", 1, "r#0")
    assert divided.place(request(last_instance="home"), 16, fleet) == "other"
    assert divided.place(request(), 16, fleet) == "other"


def test_seer_moves_a_request_only_to_where_those_that_run_can_go_on():
    seer = POLICIES["seer"]
    roomy = Capacity(kv_blocks=2560, block_size=16, max_num_seqs=400, max_model_len=4096)
    spare = min(SPARE_CHUNKS * 16 // 16, 2560 // SPARE_PART)
    needed = roomy.blocks_for(16, 16)
    full = roomy.kv_blocks - needed - spare
    assert seer.place(request(), 16, Fleet([InstanceView("a", roomy, 1, reserved_blocks=full)])) == "a"
    fleet = Fleet([InstanceView("a", roomy, 1, reserved_blocks=full + 1)])
    assert seer.place(request(), 16, fleet) is None
    assert seer.place(request(last_instance="a"), 16, fleet) == "a", "who runs there needs room for a chunk"
    assert POLICIES["divided"].place(request(), 16, fleet) == "a"
    # Where nothing runs, nobody else needs the room.
    fleet.release("a", 0, "r#0")
    assert seer.place(request(), 16, fleet) == "a"


def test_seer_goes_on_until_it_has_run_its_share_of_what_may_come():
    seer, known = POLICIES["seer"], Estimate(64.0)

    def goes_on(generated: int, came_with: int = 0) -> bool:
        return seer.goes_on(request(generated=generated, came_with=came_with), known)

    turn = next(tokens for tokens in range(64) if tokens >= STAY * (64 - tokens))
    assert all(goes_on(tokens) for tokens in range(1, turn))
    assert not any(goes_on(tokens) for tokens in range(turn, 64))
    assert goes_on(turn, came_with=turn - 1)
    for name in POLICIES.keys() - {"seer"}:
        assert not POLICIES[name].goes_on(request(generated=1), known), "others take turns"


def test_chunks_follow_the_cap_where_no_size_is_given():
    def chunk(policy: str, cap: int, generated: int = 0) -> int:
        return POLICIES[policy].chunk(RequestView("r", 0, 0, 16, cap, generated=generated), None)

    assert [chunk("seer", cap) for cap in (64, 1024, 8192, 65_536)] == [64, 256, 256, 1024]
    assert chunk("seer", 65_536, generated=65_000) == 536
    assert chunk("static", 65_536) == 65_536


def test_migrate_never_stays():
    migrate = POLICIES["migrate"]
    views = Fleet([InstanceView("a", CAPACITY), InstanceView("b", CAPACITY)])
    assert migrate.place(request(last_instance="a"), 8, views) == "b"
    assert migrate.place(request(last_instance="b"), 8, views) == "a"
    assert migrate.place(request(last_instance="gone"), 8, views) in ("a", "b")
    for _ in range(CAPACITY.max_num_seqs):
        views.reserve("b", 1, "r#0")
    assert migrate.place(request(last_instance="a"), 8, views) is None


def test_least_loaded_asks_for_a_seat_not_for_room():
    place = POLICIES["least-loaded"].place
    fleet = Fleet([InstanceView("a", CAPACITY, chunks=2), InstanceView("b", CAPACITY, 1, reserved_blocks=99)])
    assert place(request(), 64, fleet) == "b"
    full = Fleet(InstanceView(name, CAPACITY, chunks=4) for name in "ab")
    assert place(request(), 64, full) is None


def test_algorithm_2_runs_probes_shortest_first_then_the_longest_groups():
    order = POLICIES["seer-paper"].order
    probe, other = RequestView("p", 0, 0, 16, 64, queued=9), RequestView("o", 0, 1, 16, 64, queued=1)
    further = RequestView("f", 1, 0, 16, 64, generated=8, queued=2)
    keys = [
        order(probe, Estimate(5.0)),
        order(further, Estimate(64.0)),
        order(other, Estimate(60.0)),
        order(other, Estimate(9.0)),
    ]
    assert keys == sorted(keys)


def test_ours_sorts_by_what_could_still_come():
    order = POLICIES["seer"].order
    nothing_known = Estimate(64.0)
    assert order(request(generated=8), nothing_known) > order(request(generated=4), nothing_known)
    short, long = Estimate(8.0, 0.2), Estimate(20.0, 0.2)
    assert order(request(), long) < order(request(), short)
    vague = Estimate(8.0, 0.9)
    assert order(request(), vague) < order(request(), short), "who knows less must look earlier"


@pytest.mark.parametrize("spread", [0.2, 0.6, 1.0])
def test_plausible_is_rarely_passed(spread):
    estimate, cap, rng = Estimate(300.0, spread), 1_000_000, random.Random(0)
    drawn = [math.exp(math.log(300.0) + spread * rng.gauss(0, 1)) for _ in range(200_000)]
    for generated in (0, 200, 500):
        beyond = [length for length in drawn if length > generated]
        passed = sum(length > length_quantile(estimate, generated, cap) for length in beyond)
        assert passed <= 2 * TAIL_PROBABILITY * len(beyond) + 5


def test_the_oracle_goes_by_what_is_left():
    order = oracle({"r": 50}).order
    assert order(request(generated=10), Estimate(1.0)) < order(request(generated=20), Estimate(64.0))
