from seer.local.restarts import HEALTHY_SECONDS, LIMIT, PAUSES, Restarts


def test_pauses_grow_until_it_is_given_up():
    record = Restarts()
    assert [record.pause(0.0) for _ in range(LIMIT + 1)] == [*PAUSES, None]
    assert list(PAUSES) == sorted(PAUSES)
    assert record.total == LIMIT


def test_what_has_proved_that_it_works_is_not_given_up_for_its_work():
    record = Restarts()
    pauses = [record.pause(1.0, proved=True) for _ in range(3 * LIMIT)]
    assert pauses == [*PAUSES, *[PAUSES[-1]] * (2 * LIMIT)]
    # Starts that fail count, from the last proof on.
    assert [record.pause(0.0) for _ in range(LIMIT)] == [PAUSES[-1]] * LIMIT
    assert record.pause(1.0, proved=True) == PAUSES[-1]
    assert [record.pause(0.0) for _ in range(LIMIT + 1)] == [PAUSES[-1]] * LIMIT + [None]


def test_a_healthy_incarnation_forgives():
    record = Restarts()
    for _ in range(3 * LIMIT):
        assert record.pause(HEALTHY_SECONDS) == PAUSES[0]
    assert record.pause(HEALTHY_SECONDS - 1) == PAUSES[1]
    assert record.total == 3 * LIMIT + 1
