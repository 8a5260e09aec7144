from seer.common.policy.fleet import Fleet, InstanceView
from seer.common.policy.length import Estimate
from seer.common.policy.schedule import BALANCE_SPREAD, POLICIES, RequestView
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


def test_divided_needs_room_for_the_worst_case():
    divided = POLICIES["divided"]
    # 16 + 31 + 0 + 1 = 48 tokens = 3 blocks; 16 + 32 + 1 = 49 tokens = 4 blocks
    fleet = Fleet([InstanceView("a", CAPACITY, reserved_blocks=7)])
    assert divided.place(request(), 31, fleet) == "a"
    assert divided.place(request(), 32, fleet) is None
    fleet.pin("a", 1)
    assert divided.place(request(), 31, fleet) is None
    assert divided.place(request(), 31, Fleet([InstanceView("a", CAPACITY, chunks=4)])) is None


def test_divided_stays_with_its_prefix_until_balance_matters():
    divided = POLICIES["divided"]
    roomy = Capacity(kv_blocks=1000, block_size=16, max_num_seqs=400, max_model_len=4096)
    fleet = Fleet([InstanceView("home", roomy, chunks=BALANCE_SPREAD), InstanceView("other", roomy)])
    assert divided.place(request(last_instance="home"), 16, fleet) == "home"
    fleet.reserve("home", 1)
    assert divided.place(request(last_instance="home"), 16, fleet) == "other"
    assert divided.place(request(), 16, fleet) == "other"


def test_divided_is_first_come_first_served_and_chunked():
    divided = POLICIES["divided"]
    assert divided.order(request(queued=1), Estimate(5.0)) < divided.order(request(queued=2), Estimate(1.0))
    assert divided.chunk(request(), 48) == 48
    assert divided.chunk(request(generated=40), 48) == 24


def test_migrate_never_stays():
    migrate = POLICIES["migrate"]
    views = Fleet([InstanceView("a", CAPACITY), InstanceView("b", CAPACITY)])
    assert migrate.place(request(last_instance="a"), 8, views) == "b"
    assert migrate.place(request(last_instance="b"), 8, views) == "a"
    assert migrate.place(request(last_instance="gone"), 8, views) in ("a", "b")
    for _ in range(CAPACITY.max_num_seqs):
        views.reserve("b", 1)
    assert migrate.place(request(last_instance="a"), 8, views) is None
