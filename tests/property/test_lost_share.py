"""Where a rollout's time went: parts that add up, whatever happened, and the causes that they name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_rows import CAPACITY

from seer.common.policy.rollout_bound import bound_seconds
from seer.common.types import InstanceStats
from seer.report.lost_share import LostShare, Part, lost_share
from seer.report.records import Chunk, End, EngineIncarnation, Response, Rollout, Span, Speed, Timeline

SECONDS = st.floats(0, 50).map(lambda each: round(each, 2))


@st.composite
def timelines(draw: st.DrawFn) -> tuple[Timeline, Rollout, float]:
    """Rollouts on engines that come and go, with chunks of any kind, other rollouts, and spans."""
    rollout, other = Rollout("r", "t", 0, 0.0), Rollout("o", "t", 0, 0.0)
    timeline = Timeline(rollouts=[rollout, other])
    for name in "xyz"[: draw(st.integers(1, 3))]:
        joined = draw(SECONDS)
        left = draw(st.none() | SECONDS.map(lambda more, joined=joined: joined + more))
        timeline.incarnations.append(EngineIncarnation(name, 1, CAPACITY, joined, left))
        best, alone = draw(st.just(0.0) | st.floats(0.1, 100)), draw(st.sampled_from([0.0, 0.01, 0.3, 5.0]))
        timeline.speeds[name] = Speed(best, alone)
    for number in range(draw(st.integers(1, 8))):
        of = draw(st.sampled_from([rollout, rollout, other]))
        response, at = Response(of, f"p{number}", number, 0, submitted=draw(SECONDS)), 0.0
        at = response.submitted
        for _ in range(draw(st.integers(0, 4))):
            engine = draw(st.sampled_from([each.name for each in timeline.incarnations]))
            start = at + draw(st.sampled_from([0.0, 1.0, 7.5]))
            at = start + draw(SECONDS)
            how, tokens = draw(st.sampled_from(End)), draw(st.integers(0, 300))
            chunk = Chunk(response, engine, 0, 0, start, at, 8, draw(st.integers(0, 10)), False, how, tokens)
            response.chunks.append(chunk)
            of.chunks.append(chunk)
        made = sum(chunk.tokens for chunk in response.chunks)
        response.generated = draw(st.sampled_from([made, made // 2, made + 5]))
        response.finished = draw(st.sampled_from([at, None]))
        of.responses.append(response)
    for _ in range(draw(st.integers(0, 2))):
        start = draw(SECONDS)
        timeline.spans.append(Span(start, start + draw(SECONDS), "weights 1"))
    return timeline, rollout, draw(SECONDS)


def shared(timeline: Timeline, rollout: Rollout, tail_start: float) -> LostShare | None:
    chunks: dict[str, list[Chunk]] = {}
    for chunk in (chunk for each in timeline.rollouts for chunk in each.chunks):
        chunks.setdefault(chunk.engine, []).append(chunk)
    return lost_share(timeline, rollout, chunks, tail_start)


@given(timelines())
def test_parts_add_up_and_none_is_negative(given_: tuple[Timeline, Rollout, float]) -> None:
    timeline, rollout, tail_start = given_
    found = shared(timeline, rollout, tail_start)
    made = [min(each.generated, sum(chunk.tokens for chunk in each.chunks)) for each in rollout.responses]
    known = any(each.best_rate for each in timeline.speeds.values())
    assert (found is not None) == bool(known and sum(made) and rollout.end > rollout.submitted)
    if found is None:
        return
    assert found.parts.keys() == set(Part)
    assert min(found.parts.values()) >= -1e-9 * found.whole
    assert sum(found.parts.values()) == pytest.approx(found.whole, rel=1e-9)
    assert found.parts[Part.USEFUL] == sum(made)
    rounded = found.per_mille()
    assert sum(rounded.values()) == 1000
    assert all(abs(share - 1000 * found.parts[part] / found.whole) < 1 for part, share in rounded.items())


@given(timelines())
def test_what_is_possible_is_the_bound(given_: tuple[Timeline, Rollout, float]) -> None:
    timeline, rollout, tail_start = given_
    found = shared(timeline, rollout, tail_start)
    if found is None:
        return
    seconds = rollout.end - rollout.submitted
    made = [min(each.generated, sum(chunk.tokens for chunk in each.chunks)) for each in rollout.responses]
    there = []
    for each in timeline.incarnations:
        end = rollout.end if each.left is None else min(each.left, rollout.end)
        speed = timeline.speeds[each.name]
        stats = InstanceStats(best_rate=speed.best_rate, token_seconds_alone=speed.seconds_alone)
        there.append((stats, max(0.0, end - max(each.joined, rollout.submitted)) / seconds))
    bound = bound_seconds(sum(made), max(made), there)
    alone = [each.seconds_alone for each in timeline.speeds.values() if each.seconds_alone]
    if bound is None or any(not share for _, share in there):
        return  # an engine that never was there has no part in the bound, but may be the fastest
    assert found.possible == pytest.approx(min(1.0, bound / seconds), rel=1e-6), alone


class Scene:
    """One engine that makes 10 tokens/s at best, with two chunks of 5 tokens/s that run at once from 0 to 2 s."""

    def __init__(self, alone: float = 0.0) -> None:
        self.rollout, self.other = Rollout("r", "t", 0, 0.0), Rollout("o", "t", 0, 0.0)
        self.timeline = Timeline(rollouts=[self.rollout, self.other])
        self.timeline.incarnations = [EngineIncarnation("e", 1, CAPACITY, 0.0)]
        self.timeline.speeds = {"e": Speed(10.0, alone)}
        self.run("a", 0.0, 2.0)
        self.run("b", 0.0, 2.0)

    def run(
        self, name: str, start: float, end: float, *, rate: float = 5.0, blocks: int = 2, how: End = End.KEPT,
        other: bool = False, submitted: float = 0.0,
    ) -> Response:  # fmt: skip
        """Add a response of one chunk."""
        rollout, tokens = self.other if other else self.rollout, round(rate * (end - start))
        response = Response(rollout, name, 0, 0, generated=tokens, finished=end, submitted=submitted)
        response.chunks = [Chunk(response, "e", 0, 0, start, end, 8, blocks, False, how, tokens)]
        rollout.responses.append(response)
        rollout.chunks += response.chunks
        return response

    def parts(self, tail_start: float = 100.0) -> dict[Part, float]:
        """Return the parts that are not empty, in tokens."""
        found = shared(self.timeline, self.rollout, tail_start)
        assert found is not None
        return {part: round(tokens, 3) for part, tokens in found.parts.items() if tokens > 1e-9}


def test_full_kv_is_what_holds_the_next_one_up() -> None:
    scene = Scene()
    scene.run("c", 2.0, 12.0, blocks=6)
    scene.run("d", 12.0, 22.0, blocks=6)
    assert scene.parts() == {Part.USEFUL: 120, Part.KV_FULL: 50, Part.FEW: 50}
    assert scene.parts(tail_start=12.0) == {Part.USEFUL: 120, Part.KV_FULL: 50, Part.TAIL: 50}


def test_where_there_was_room_it_waited() -> None:
    scene = Scene()
    scene.run("c", 2.0, 12.0)
    scene.run("d", 12.0, 22.0)
    assert scene.parts(12.0) == {Part.USEFUL: 120, Part.WAITS: 50, Part.TAIL: 50}
    scene.rollout.responses[-1].submitted = 12.0  # it was not there before
    assert scene.parts(12.0) == {Part.USEFUL: 120, Part.FEW: 50, Part.TAIL: 50}


def test_engines_that_load_weights_or_have_no_buffer_wait() -> None:
    scene = Scene()
    scene.timeline.spans = [Span(2.0, 12.0, "weights 1")]
    scene.run("c", 12.0, 14.0, rate=10.0)
    assert scene.parts(2.0) == {Part.USEFUL: 40, Part.WAITS: 100}


def test_lost_chunks_took_what_others_got_meanwhile_or_all() -> None:
    scene = Scene()
    scene.run("c", 2.0, 12.0)
    scene.run("d", 2.0, 12.0, rate=0.0, how=End.ENGINE_LOST)
    scene.run("e", 12.0, 14.0, rate=0.0, how=End.FAILED)
    assert scene.parts() == {Part.USEFUL: 70, Part.LOST: 50 + 20}


def test_tokens_that_were_computed_again_are_lost() -> None:
    scene = Scene()
    response = scene.run("c", 2.0, 4.0, rate=10.0)
    response.generated = 5
    assert scene.parts() == {Part.USEFUL: 25, Part.LOST: 15}


def test_other_rollouts_and_trajectories_that_are_away() -> None:
    scene = Scene()
    scene.run("o", 2.0, 12.0, other=True)
    agent = scene.run("c", 12.0, 14.0, rate=10.0)
    turns = [
        Response(scene.rollout, "c", 0, 0, finished=2.0),
        Response(scene.rollout, "c", 0, 0, submitted=12.0),
    ]
    agent.turns = turns
    assert scene.parts() == {Part.USEFUL: 40, Part.OTHERS: 50, Part.AWAY: 50}


def test_what_is_slower_than_the_best_for_as_many_is_overhead() -> None:
    scene = Scene()
    scene.run("c", 2.0, 12.0, rate=3.0)
    scene.run("d", 2.0, 12.0, rate=3.0)
    assert scene.parts() == {Part.USEFUL: 80, Part.OVERHEAD: 40}
    alone = Scene(alone=0.125)  # a lone request could make 8 of the 10 tokens/s
    alone.run("c", 2.0, 12.0, rate=5.0)
    assert alone.parts() == {Part.USEFUL: 70, Part.FEW: 20, Part.OVERHEAD: 30}


def test_the_longest_response_alone_is_nobodys_loss() -> None:
    scene = Scene(alone=0.2)
    scene.run("c", 2.0, 22.0)
    assert scene.parts(2.0) == {Part.USEFUL: 120, Part.LONGEST: 80, Part.TAIL: 20}


def test_without_speeds_nothing_is_said() -> None:
    scene = Scene()
    scene.timeline.speeds = {}
    assert shared(scene.timeline, scene.rollout, 0.0) is None
    scene.timeline.speeds = {"e": Speed()}
    assert shared(scene.timeline, scene.rollout, 0.0) is None
