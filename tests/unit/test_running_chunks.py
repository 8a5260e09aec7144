"""The tokens of chunks that run: estimates from what engines report, and what becomes of them."""

import orders
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.policy.schedule import POLICIES
from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.requests import events
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.requests.state import Limits
from seer.services.buffer.running_chunks import InFlight, RunningChunk, RunningChunks, Stretch
from seer.services.buffer.sleep_machine import SleepMachine
from seer.services.buffer.statistics import Statistics
from seer.services.buffer.weights.weights_machine import WeightsMachine


def tokens(running: RunningChunks, now: float, *requests: str, engine: str = "e") -> list[float]:
    in_flight = InFlight(running, now)
    return [in_flight.tokens(engine, request) for request in requests]


def two_chunks() -> RunningChunks:
    """Of a new engine, `a` since 0 s and `b` since 1 s, with 30 tokens of both at 2 s."""
    running = RunningChunks()
    running.reported("e", 0, 0.0)
    running.began("e", "a", RunningChunk(1, 0.0, 0.0, 100))
    running.began("e", "b", RunningChunk(2, 1.0, 1.0, 100))
    running.reported("e", 30, 2.0)
    return running


def test_what_an_engine_has_not_returned_is_split_by_time() -> None:
    running = two_chunks()
    assert tokens(running, 2.0, "a", "b", "unknown") == [20.0, 10.0, 0.0]
    assert tokens(running, 2.0, "a", engine="other") == [0.0]
    assert running.rate("e") == 0.0, "one report since it has work"
    running.reported("e", 54, 3.0)
    assert running.rate("e") == 24.0
    assert running.rate("other") == 0.0


def test_tokens_that_came_are_not_counted_twice() -> None:
    running = two_chunks()
    running.returned("e", "a", 1, 20, 2.0)
    assert running.ended("e", "a") is not None
    assert tokens(running, 2.0, "a", "b") == [0.0, 10.0]
    running.returned("e", "a", 1, 20, 2.0)  # late: it is known no more
    assert tokens(running, 2.0, "b") == [10.0]


def test_a_stream_goes_on_from_its_last_tokens() -> None:
    running = two_chunks()
    running.returned("e", "a", 1, 18, 2.0)
    running.reported("e", 42, 3.0)
    assert tokens(running, 3.0, "a", "b") == [8.0, 16.0]
    running.returned("e", "a", 7, 18, 3.0)  # of another attempt
    assert tokens(running, 3.0, "a", "b") == [8.0, 16.0]


def test_nobody_has_more_than_its_chunk_may_generate() -> None:
    running = RunningChunks()
    running.reported("e", 0, 0.0)
    running.began("e", "a", RunningChunk(1, 0.0, 0.0, 8))
    running.reported("e", 50, 1.0)
    assert tokens(running, 1.0, "a") == [8.0]


def test_what_was_dropped_is_nobodys() -> None:
    running = two_chunks()
    assert running.dropped("e", "a", InFlight(running, 2.0)) is not None
    assert tokens(running, 2.0, "a", "b") == [0.0, 10.0]
    assert running.dropped("e", "a", InFlight(running, 2.0)) is None
    running.returned("e", "b", 2, 10, 2.0)
    running.ended("e", "b")
    running.reported("e", 1000, 3.0)  # nothing runs: it is of nobody's chunk
    running.began("e", "c", RunningChunk(3, 3.0, 3.0, 100))
    assert tokens(running, 4.0, "c") == [0.0]


def test_a_report_says_what_an_engine_did_since_the_last_with_how_many_requests_and_how_much_kv() -> None:
    running = RunningChunks()
    assert running.reported("e", 7, 0.0) is None, "nothing ran"
    running.began("e", "a", RunningChunk(1, 0.0, 0.0, 100, context=10))
    assert running.reported("e", 7, 1.0) is None, "it is not known when it began"
    running.began("e", "b", RunningChunk(2, 1.0, 1.0, 100, context=50))
    assert running.reported("e", 37, 3.0) == Stretch(2.0, 30, 1.5, (10 + 60 + 30) / 2)
    running.returned("e", "a", 1, 20, 3.0)  # which changes no KV
    assert running.reported("e", 37, 4.0) == Stretch(1.0, 0, 2.0, 90)
    running.ended("e", "a")
    assert running.reported("e", 40, 5.0) == Stretch(1.0, 3, 1.5, (90 + 50 + 10 + 3) / 2)
    running.dropped("e", "b", InFlight(running, 5.0))
    assert running.reported("e", 44, 6.0) is None, "it may have been idle"
    running.began("e", "c", RunningChunk(3, 6.0, 6.0, 100, context=5))
    assert running.reported("e", 44, 7.0) is None
    assert running.reported("e", 48, 8.0) == Stretch(1.0, 4, 1.0, (5 + 9) / 2)


def test_an_engine_that_generated_before_the_buffer_knew_it_begins_at_its_first_report() -> None:
    running = RunningChunks()
    running.began("e", "a", RunningChunk(1, 0.0, 0.0, 100))
    running.reported("e", 10**6, 0.5)
    assert tokens(running, 1.0, "a") == [0.0]
    running.reported("e", 10**6 + 12, 1.5)
    assert tokens(running, 1.5, "a") == [12.0]
    assert running.gone("e") == ["a"]
    assert running.gone("e") == []
    assert running.engines == []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["began", "returned", "ended", "dropped", "reported", "gone"]),
        st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 50), st.floats(0, 2),
    ),
    max_size=60,
)  # fmt: skip


@given(STEPS)
def test_estimates_are_bounded_whatever_happens(steps: list[tuple[str, str, str, int, float]]) -> None:
    running, now = RunningChunks(), 0.0
    generated = dict.fromkeys("ab", 0)
    for what, engine, request, count, seconds in steps:
        now += seconds
        match what:
            case "began":
                running.began(engine, request, RunningChunk(1, now, now, count, context=7))
            case "returned":
                running.returned(engine, request, 1, count, now)
            case "ended":
                running.ended(engine, request)
            case "dropped":
                running.dropped(engine, request, InFlight(running, now))
            case "reported":
                generated[engine] += count
                did = running.reported(engine, generated[engine], now)
                assert did is None or (did.tokens == count and did.requests > 0 <= did.kv_tokens)
            case "gone":
                running.gone(engine)
        for name in "ab":
            found = tokens(running, now, *"xyz", engine=name)
            known = [running.of(name, each) for each in "xyz"]
            assert running._engines[name].contexts == sum(each.context for each in known if each)
            assert all(
                0 <= each <= (chunk.left if chunk else 0) for each, chunk in zip(found, known, strict=True)
            )
            assert sum(found) <= generated[name] + 1e-6
            assert running.rate(name) >= 0


def test_a_thousand_that_are_dropped_at_once_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = BufferMachine(
        RequestMachine(POLICIES["seer"], Limits(64)), WeightsMachine(1.0), SleepMachine(1.0)
    )
    statistics, looks = Statistics(machine), []
    spread = RunningChunks.spread
    monkeypatch.setattr(
        RunningChunks,
        "spread",
        lambda *given: looks.append(given[1]) or spread(*given),  # type: ignore[func-returns-value]
    )
    statistics.running.reported("e", 0, 0.0)
    for number in range(1000):
        statistics.running.began("e", f"r/p#{number}", RunningChunk(number, 0.0, 0.0, 64))
    statistics.running.reported("e", 5000, 1.0)
    drops = [orders.dropped_chunk("e", f"r/p#{number}", number) for number in range(1000)]
    statistics.record(2.0, events.EstimatesChanged({}, {}), drops)
    assert statistics.running.requests("e") == []
    assert looks == ["e"]
