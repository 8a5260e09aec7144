from seer.services.buffer.liveness import MAX_TICKS, Liveness


def test_a_silent_peer_is_told_once_and_one_that_is_heard_is_not():
    peers = Liveness(5.0, 1.0)
    peers.received("a")
    peers.received("b")
    silent = []
    for now in range(20):
        silent += peers.tick(float(now))
        peers.received("b")
    assert silent == ["a"]
    peers.forget("b")
    assert [peers.tick(float(now)) for now in range(20, 40)] == [[]] * 20


def test_however_long_a_stall_it_counts_for_two_ticks():
    peers = Liveness(5.0, 1.0)
    peers.tick(0.0)
    peers.received("a")
    assert [peers.tick(1000.0 * stall) for stall in range(1, 3)] == [[], []]
    assert peers.tick(3000.0) == ["a"]
    assert 2 * MAX_TICKS < 5.0 < 3 * MAX_TICKS


def test_a_stall_before_the_first_tick_counts_nothing():
    peers = Liveness(5.0, 1.0)
    peers.received("a")
    assert peers.tick(1e9) == []
    assert [peers.tick(1e9 + now) for now in range(1, 7)] == [[]] * 5 + [["a"]]


def test_one_that_is_heard_hides_none_that_is_silent():
    peers = Liveness(5.0, 1.0)
    peers.received("a")
    peers.received("b")
    for now in range(5):
        peers.tick(float(now))
    peers.received("a")
    assert peers.tick(5.0) + peers.tick(6.0) == ["b"]
