"""Which prompts run ahead, where, and what ends them; the machines beside them do not know."""

import numpy as np
import orders
import pytest
from buffer_events import CAPACITY, make
from msgspec.structs import replace
from orders import pick

from seer.common import ids, wire
from seer.common.errors import InvalidField
from seer.common.types import Placed, SamplingParams, TurnSpec
from seer.services.buffer import run_ahead, submissions
from seer.services.buffer.events import Drained, Left
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.run_ahead import RunAhead

ONE_EACH = 180  # tokens of which one response fits on an instance
WHOLE = SamplingParams(max_tokens=ONE_EACH)
NOTHING = ([], [])


class World:
    """Two instances."""

    def __init__(self, chunk_size=ONE_EACH, **limits):
        self.machine = make(first_attempt=1000, chunk_size=chunk_size, **limits)
        self.ahead = RunAhead(self.machine)

    def name(self, *prompts, trainer="t", rollout="n", n=1, sampling=WHOLE, prompt_len=10, **fields):
        tokens = np.arange(prompt_len * len(prompts), dtype=np.int32)
        asked = wire.NextPrompts(
            rollout_id=rollout, rollout_number=3, seed=2, n=n, sampling=sampling, prompt_ids=list(prompts),
            lengths=[prompt_len] * len(prompts), tokens=tokens, **fields,
        )  # fmt: skip
        self.ahead.name(trainer, trainer.encode(), asked, submissions.prompts(asked))
        return self.took()

    def fill(self):
        self.ahead.fill(self.machine.instances)
        return self.took()

    def do(self, event):
        """Apply an event; return what is ended for it, and what the machine dispatched."""
        out = self.machine.apply(event, 1.0)
        self.ahead.before(event, out)
        return self.took()[1], pick(out, instructions.Dispatch)

    def took(self):
        """Return the chunks that begin, and the instances and ids of those that end."""
        orders_ = self.ahead.take()
        begun = [(name, order) for name, order in orders_ if isinstance(order, wire.RunChunk)]
        ended = [(name, order.request_id) for name, order in orders_ if isinstance(order, wire.DropChunk)]
        return begun, ended

    def goes_on(self, name, chunk, *tokens):
        """End a chunk whose response goes on; return what begins."""
        assert self.ahead.ended(name, chunk.request_id, chunk.attempt, np.array(tokens, np.int32))
        return self.took()[0]

    def submit(self, trainer="u", max_tokens=8, prompt="p", **fields):
        spec = events.GroupSpec(prompt, 10, **fields)
        return self.do(events.GroupsSubmitted(trainer, f"r{prompt}", 1, max_tokens, [spec], address=b"u"))

    @property
    def is_empty(self):
        return not (self.ahead._works or self.ahead._running or len(self.ahead._fleet))


@pytest.fixture
def world():
    return World()


def test_a_response_is_the_next_submissions_own_by_its_noise_and_a_whole_chunk(world):
    extras = SamplingParams(
        max_tokens=20, top_p=0.5, top_logprobs=2, prompt_logprobs=1, routed_experts_from=0
    )
    assert world.name("p", n=2, sampling=replace(extras, receipt=True)) == NOTHING
    begun, _ = world.fill()
    assert [name for name, _ in begun] == ["a", "b"]
    for index, (_, chunk) in enumerate(begun):
        assert chunk.key == ids.request_key(2, 3, "p", index)
        assert (chunk.prompt_len, chunk.max_new_tokens, chunk.tokens.tolist()) == (10, 20, list(range(10)))
        assert chunk.sampling == SamplingParams(max_tokens=20, top_p=0.5), "nothing beside tokens"
        assert (chunk.ahead, chunk.wait_for_room, chunk.draft_group, chunk.stream) == (True, True, "", False)
    assert len({chunk.attempt for _, chunk in begun}) == 2
    assert all(1000 < chunk.attempt < 1010 for _, chunk in begun), "numbers of this incarnation"


def test_responses_take_the_room_there_is_all_prompts_first_and_each_once(world):
    world.name("p", "q", n=2)
    begun, _ = world.fill()
    first = [(name, chunk.request_id) for name, chunk in begun]
    assert [(name, key.partition("/")[2]) for name, key in first] == [("a", "p#0"), ("b", "q#0")]
    assert world.fill() == NOTHING
    assert not world.ahead.ended("a", begun[0][1].request_id, 0), "another attempt"
    assert not world.ahead.ended("b", begun[0][1].request_id, begun[0][1].attempt), "another instance"
    assert world.took() == NOTHING
    assert world.ahead.ended("a", begun[0][1].request_id, begun[0][1].attempt)
    [(name, chunk)] = world.took()[0]
    assert (name, chunk.request_id.partition("/")[2]) == ("a", "p#1")
    assert not world.ahead.ended("a", begun[0][1].request_id, begun[0][1].attempt), "it has ended"
    assert world.ahead.ended("a", chunk.request_id, chunk.attempt)
    [(_, last)] = world.took()[0]
    assert world.ahead.ended("b", begun[1][1].request_id, begun[1][1].attempt)
    assert world.ahead.ended("a", last.request_id, last.attempt)
    assert world.is_empty


def test_responses_run_a_chunk_at_a_time_in_turn_and_go_on_where_they_stand():
    world = World(chunk_size=16)
    world.name("p", "q", n=8, sampling=SamplingParams(max_tokens=40))
    begun, _ = world.fill()
    assert [name for name, _ in begun] == ["a", "b"] * 8, "as many as there is room for, on each in turn"
    assert {chunk.max_new_tokens for _, chunk in begun} == {16}
    first, second = (chunk for name, chunk in begun if name == "a" and chunk.request_id[-1] in "01")
    [(name, later)] = world.goes_on("a", first, *range(16))
    assert (name, later.request_id, later.key) == ("a", first.request_id, first.key)
    assert (later.prompt_len, later.max_new_tokens) == (10, 16)
    assert later.tokens.tolist() == [*first.tokens.tolist(), *range(16)]
    assert later.attempt > begun[-1][1].attempt
    assert not world.ahead.ended("a", first.request_id, first.attempt)
    [(_, last)] = world.goes_on("a", later, *range(16))
    assert last.max_new_tokens == 8, "40 in all"
    assert world.goes_on("a", last, *range(8)) == []
    assert world.goes_on("a", second) == [], "without a token it would go on for ever"
    world.name("p", "q", n=9, rollout="more", sampling=SamplingParams(max_tokens=40))
    begun, _ = world.fill()
    [(_, other)] = world.goes_on("a", begun[0][1], *range(16))
    assert other.request_id[-1] == "8", "first tokens come first"
    assert not other.tokens[10:].size


def test_each_trainer_has_as_many_as_the_other_and_tokens_that_wait_are_bounded(monkeypatch):
    world = World(chunk_size=16)
    short = SamplingParams(max_tokens=40)
    world.name("p", n=30, sampling=short)
    world.name("q", n=30, trainer="v", sampling=short)
    begun, _ = world.fill()
    assert [work.running for work in world.ahead._works.values()] == [8, 8]
    monkeypatch.setattr(run_ahead, "MAX_TOKENS", 40)
    for name, chunk in begun[:8]:
        world.goes_on(name, chunk, *range(16))
    works = list(world.ahead._works.values())
    held = [sum(len(each.output) for each in work.waiting) for work in works]
    assert held == [work.held for work in works]
    assert sum(held) == 32, "what is beyond ended"
    assert sum(work.count for work in works) == 60 - 6
    for trainer in "tv":
        world.do(events.TrainerLost(trainer.encode()))
    assert world.is_empty


def test_a_request_gets_its_instance_to_itself_before_it_begins(world):
    world.name("p", "q")
    running = {name: chunk.request_id for name, chunk in world.fill()[0]}
    ended, [dispatch] = world.submit()
    assert ended == [(dispatch.instance, running[dispatch.instance])]
    world.name("s", "u", rollout="later")
    [(other, _)] = world.fill()[0]
    assert other != dispatch.instance
    ends = orders.ended(dispatch.instance, dispatch.request_id, dispatch.attempt, 8)
    assert world.do(ends) == NOTHING
    assert [name for name, _ in world.fill()[0]] == [dispatch.instance]


def test_none_begins_while_anything_waits(world):
    world.name("p", trainer="t")
    world.submit(max_tokens=ONE_EACH, prompt="1")
    world.submit(max_tokens=ONE_EACH, prompt="2")
    while len(world.machine.scheduler) < 1:
        world.submit(max_tokens=ONE_EACH, prompt=str(len(world.machine.requests) + 1))
    world.machine.instances.pin("a", 0)
    assert world.fill() == NOTHING
    held = World()
    held.name("p")
    held.do(events.GroupsSubmitted("u", "r", 1, 8, [events.GroupSpec("q", 10)], weight_version=7))
    assert held.machine.registry.held
    assert held.fill() == NOTHING


def test_none_begins_while_a_trajectory_is_away(world):
    world.name("p")
    turn = TurnSpec(10, 0, 100, 60.0)
    spec = events.GroupSpec("q", 10, shared_id="r/g", turn=turn)
    _, [dispatch] = world.do(events.GroupsSubmitted("u", "r", 1, 8, [spec], open=True))
    world.do(orders.ended(dispatch.instance, dispatch.request_id, dispatch.attempt, 8))
    assert world.machine.registry.trajectories.away
    assert world.fill() == NOTHING
    world.do(orders.cancelled("u", "r", ["q"]))
    assert len(world.fill()[0]) == 1


@pytest.mark.parametrize(
    "event",
    [
        events.SubmissionsHeld(True),
        Drained(),
        Left(["a"], died=True),
        orders.joined("b", CAPACITY),
        events.TrainerLost(b"t"),
        events.GroupsSubmitted("t", "r", 1, 8, [events.GroupSpec("q", 10)]),
    ],
    ids=["update or sleep", "end of the buffer", "engine lost", "engine again", "trainer lost", "submission"],
)
def test_all_of_it_ends_by(event, world):
    world.name("p", "q", n=3)
    running = [(name, chunk.request_id) for name, chunk in world.fill()[0]]
    ended, _ = world.do(event)
    assert ended == running
    assert world.is_empty
    assert world.fill() == NOTHING


def test_what_others_do_ends_nothing(world):
    world.name("p", "q", n=3)
    world.name("x", trainer="v")
    running = world.fill()[0]
    assert [chunk.request_id.partition("/")[2] for _, chunk in running] == ["p#0", "x#0"]
    for event in (
        events.TrainerLost(b"u"),
        Left(["c"]),
        orders.joined("c", CAPACITY),
        events.SubmissionsHeld(False),
    ):
        assert world.do(event) == NOTHING
    assert world.do(events.TrainerLost(b"v")) == ([("b", running[1][1].request_id)], [])
    assert world.ahead.addresses == {b"t"}


def test_what_is_named_again_takes_the_place_of_what_was_but_for_a_further_part(world):
    world.name("p")
    world.name("q")
    [one, other] = world.fill()[0]
    assert [chunk.request_id.partition("/")[2] for _, chunk in (one, other)] == ["p#0", "q#0"]
    assert world.name("s", rollout="later")[1] == [(name, chunk.request_id) for name, chunk in (one, other)]
    [(_, chunk)] = world.fill()[0]
    assert chunk.request_id.partition("/")[2] == "s#0"


def test_room_is_what_no_save_to_the_pool_pins(world):
    world.machine.instances.pin("a", 10)
    world.name("p", n=3)
    assert [name for name, _ in world.fill()[0]] == ["b"]
    world.machine.instances.pin("a", 0)
    assert [name for name, _ in world.fill()[0]] == ["a"]


def test_what_cannot_run_ahead_is_refused_and_leaves_what_was_named(world):
    world.name("p")
    world = World(max_requests=4)
    world.name("p")
    placed = [[Placed("a" * 64, 0, 1)]]
    for fields, why in (
        ({"n": 5}, "prompts = 5: .* at most 4 responses of a trainer, 16 of all"),
        ({"n": 4, "rollout": "n"}, "prompts = 5"),
        ({"sampling": SamplingParams(max_tokens=500)}, "fits no instance"),
        ({"images": placed}, "prompts of text"),
        ({"groups": ["g"]}, "each a group of its own"),
    ):
        with pytest.raises(InvalidField, match=why):
            world.name("q", **{"rollout": "other"} | fields)
        assert [work.count for work in world.ahead._works.values()] == [1]
    with pytest.raises(InvalidField, match="prompt_ids"):
        world.name("p" * (wire.MAX_ID - 10))
    for number in range(4):
        world.name("p", trainer=f"t{number}", n=3)
    with pytest.raises(InvalidField, match="prompts = 4"):
        world.name("p", trainer="t9", n=4)
