"""A fixed part of the fuzzing of HTTP; `python tests/process/fuzz_http.py --bodies N --seed S` does more."""

from __future__ import annotations

from process.fuzz_http import BODIES, fuzz

BODIES_SENT = 3_000


async def test_mutated_bodies_to_every_route_get_an_answer_and_never_a_500() -> None:
    report = await fuzz(BODIES_SENT, seed=0)
    assert report["harm"] == []
    assert report["bodies"] == BODIES_SENT
    assert report["routes"].keys() == BODIES.keys()
    assert set(report["statuses"]) <= {200, 400, 404, 413, 503}
    assert min(report["statuses"][each] for each in (200, 400)) > BODIES_SENT / 20
