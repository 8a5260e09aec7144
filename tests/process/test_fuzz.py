"""A fixed part of the live fuzzing; `python tests/process/fuzz.py --frames N --seed S` does more."""

from __future__ import annotations

import pytest
from process.fuzz import fuzz

FRAMES = 30_000


@pytest.mark.parametrize("keys", [pytest.param(False, marks=pytest.mark.breadth), True], ids=["open", "keys"])
def test_hostile_peers_on_every_socket_harm_nobody(keys: bool) -> None:
    report = fuzz(FRAMES, seed=0, keys=keys)
    assert report["harm"] == {}, report
    assert report["frames"] >= FRAMES
    assert report["rollouts"] > 0
    for name, (before, after) in report["rss_mib"].items():
        assert after - before < 64, name
    assert report["messages_that_arrived"] > FRAMES / 2
    for name, hub in (("buffer", "trainers"), ("buffer", "engines"), ("buffer", "events")):
        counters = report["messages"][name][hub]
        assert min(counters[what] for what in ("received", "malformed", "strangers", "refused")) > 0, counters
