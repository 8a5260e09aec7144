"""What counts as silence."""

from seer.common.process.watchdog import Watchdog


def test_a_late_probe_counts_as_one_probe():
    watchdog = Watchdog(limit=15.0, longest=5.0, probed=0.0)
    assert not watchdog.expired(1000.0, missing=True)
    assert not watchdog.expired(1009.0, missing=True)
    assert not watchdog.expired(1010.0, missing=False)
    assert not watchdog.expired(1012.0, missing=True)
    assert [watchdog.expired(1012.0 + 4 * i, missing=True) for i in range(1, 5)] == [
        False,
        False,
        False,
        True,
    ]
