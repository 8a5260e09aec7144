from seer.services.buffer.liveness import MOST_TICKS, Liveness


def test_a_silent_peer_is_told_once_and_one_that_is_heard_is_not():
    peers = Liveness(5.0, 1.0)
    peers.heard("a")
    peers.heard("b")
    silent = []
    for now in range(20):
        silent += peers.tick(float(now))
        peers.heard("b")
    assert silent == ["a"]
    peers.forget("b")
    assert [peers.tick(float(now)) for now in range(20, 40)] == [[]] * 20


def test_however_long_a_stall_it_counts_for_two_ticks():
    peers = Liveness(5.0, 1.0)
    peers.tick(0.0)
    peers.heard("a")
    assert [peers.tick(1000.0 * stall) for stall in range(1, 3)] == [[], []]
    assert peers.tick(3000.0) == ["a"]
    assert 2 * MOST_TICKS < 5.0 < 3 * MOST_TICKS


def test_a_stall_before_the_first_tick_counts_nothing():
    peers = Liveness(5.0, 1.0)
    peers.heard("a")
    assert peers.tick(1e9) == []
    assert [peers.tick(1e9 + now) for now in range(1, 7)] == [[]] * 5 + [["a"]]


def test_one_that_is_heard_hides_none_that_is_silent():
    peers = Liveness(5.0, 1.0)
    peers.heard("a")
    peers.heard("b")
    for now in range(5):
        peers.tick(float(now))
    peers.heard("a")
    assert peers.tick(5.0) + peers.tick(6.0) == ["b"]
