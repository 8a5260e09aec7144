"""The invariants of `services/engine/best_speed.py`."""

from __future__ import annotations

import pytest

from seer.services.engine.best_speed import WINDOW_SECONDS, WINDOW_TOKENS, Pace


def test_the_best_rate_is_of_a_whole_window_of_stepping() -> None:
    pace = Pace()
    for _ in range(9):
        pace.add(4, 8, WINDOW_SECONDS / 10)
    assert pace.rate == 0.0
    pace.add(4, 8, WINDOW_SECONDS / 10 + 1e-9)
    assert pace.rate == pytest.approx(80 / WINDOW_SECONDS)


def test_a_slower_window_changes_nothing_and_a_faster_one_counts_by_itself() -> None:
    pace = Pace()
    rates = []
    for tokens in (50, 20, 70):
        pace.add(2, tokens, WINDOW_SECONDS)
        rates.append(pace.rate * WINDOW_SECONDS)
    assert rates == [50, 50, 70]


def test_a_token_alone_is_timed_in_steps_of_one_request_only() -> None:
    pace = Pace()
    pace.add(2, WINDOW_TOKENS, 0.001)
    assert pace.alone == 0.0
    pace.add(1, WINDOW_TOKENS, WINDOW_TOKENS * 0.02)
    pace.add(1, WINDOW_TOKENS, WINDOW_TOKENS * 0.01)
    pace.add(1, WINDOW_TOKENS, WINDOW_TOKENS * 0.03)
    assert pace.alone == pytest.approx(0.01)


def test_steps_that_bring_nothing_still_take_time() -> None:
    pace = Pace()
    pace.add(0, 0, WINDOW_SECONDS / 2)
    pace.add(1, 30, WINDOW_SECONDS / 2)
    assert pace.rate == pytest.approx(30 / WINDOW_SECONDS)
