"""Any interleaving of events, under each policy: invariants hold, every token is kept once, every group ends
once, and a second machine that is told the same decides the same, however often it is made anew of a snapshot.
Whoever watches counts every response and every chunk once.

Two trainers use two rollout ids, for one thing and then for another, and one has trajectories of many turns;
weights change, submissions are held, engines leave and die. The context service knows what is open or away.
"""

from collections import Counter

import orders
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from invariants import check, check_statistics
from msgspec import structs
from snapshots import again

from seer.common import wire
from seer.common.policy.length import Estimate
from seer.common.policy.schedule import POLICIES
from seer.common.types import Capacity, TurnSpec
from seer.services.buffer.buffer_machine import BufferMachine
from seer.services.buffer.events import Left, Tick, ToEngine, ToIncarnation
from seer.services.buffer.requests import events, instructions, state
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.requests.turn_placement import key_of
from seer.services.buffer.sleep_machine import SleepMachine
from seer.services.buffer.statistics import Statistics
from seer.services.buffer.weights.weights_machine import WeightsMachine
from seer.services.context.context_machine import EstimateMachine

NAMES = ("a", "b", "c")
ROLLOUTS = ("r", "s")
IMAGES = ("x", "y")


def mirrored(event: events.Event) -> events.Event:
    """Return the same news, told in the opposite order."""
    if isinstance(event, events.EstimatesChanged):
        return structs.replace(event, estimates=dict(reversed(event.estimates.items())))
    return event


class BufferModel(RuleBasedStateMachine):
    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    @initialize(chunk=st.integers(1, 40), most=st.sampled_from((4, 40)))
    def start(self, chunk, most):
        limits = state.Limits(chunk_size=chunk, max_attempts=3, max_requests=most, unfinished_tokens=400)
        self.machine, self.twin = (RequestMachine(self.policy, limits) for _ in range(2))
        self.statistics = Statistics(BufferMachine(self.machine, WeightsMachine(), SleepMachine()))
        self.opened = self.dispatched = self.dropped = 0
        self.now = 0.0
        self.prompts = self.incarnations = self.uses = 0
        self.running: dict[tuple[str, int], instructions.Dispatch] = {}
        self.stale: list[instructions.Dispatch] = []
        self.kept: Counter[str] = Counter()
        self.early: Counter[tuple[str, int]] = Counter()  # tokens of running chunks that were streamed
        self.ending: tuple[str, int] | None = None
        self.asked = dict.fromkeys(ROLLOUTS, 0)
        self.stored: set[str] = set()
        self.context = EstimateMachine()
        self.generated: dict[str, int] = {}

    def take_turn(self, trainer, rollout_id, max_tokens, spec):
        self.uses += 1
        address = f"{trainer}address".encode()
        self.send(
            events.GroupsSubmitted(
                trainer, rollout_id, 1, max_tokens, [spec], -1, self.uses, 0, address, open=True
            )
        )

    def send(self, event):
        self.now += 0.01
        told_again = {group.group_id for group in self.machine.groups.values() if group.done}
        answered = self.machine.apply(event, self.now)
        assert answered == self.twin.apply(mirrored(event), self.now)
        self.statistics.record(self.now, event, answered)
        opened = orders.pick(answered, wire.GroupOpened)
        self.opened += sum(item.size for item in opened if item.group_id not in told_again)
        self.dispatched += sum(isinstance(item, instructions.Dispatch) for item in answered)
        self.dropped += len(orders.pick(answered, wire.DropChunk))
        delivered, refused = set(), set()
        for item in answered:
            match item:
                case instructions.Dispatch():
                    assert (item.request_id, item.attempt) not in self.running
                    view = self.machine.requests[item.request_id].view
                    assert view.image_tokens <= self.machine.instances[item.instance].capacity.image_tokens
                    self.running[item.request_id, item.attempt] = item
                case ToEngine(message=wire.DropChunk(request_id=request_id, attempt=attempt)):
                    self.stale.append(self.running.pop((request_id, attempt)))
                case instructions.Keep():
                    assert self.ending is not None
                    assert self.ending[0] == item.request_id
                    self.kept[item.request_id] += self.ending[1]
                case instructions.Take():
                    assert item.group_id not in self.stored
                    self.stored.add(item.group_id)
                case instructions.Forget():
                    self.stored.remove(item.group_id)
                    self.kept = Counter({
                        key: n for key, n in self.kept.items() if key.rpartition("#")[0] != item.group_id
                    })  # fmt: skip
                case instructions.Deliver():
                    assert item.group_id not in delivered
                    delivered.add(item.group_id)
                    for request in self.machine.groups[item.group_id].results:
                        assert self.kept[request.view.request_id] == request.view.generated
                        assert request.finish
                case ToIncarnation(message=wire.Refused() as told):
                    names = {(told.rollout_id, prompt, told.submission) for prompt in told.prompt_ids}
                    assert told.message
                    assert not refused & names
                    refused |= names
                case wire.GroupOpened() | wire.RequestProgress() | wire.GroupClosed():
                    assert (item.group_id in self.context._groups) != isinstance(item, wire.GroupOpened)
                    self.context.apply(item)
        assert self.stored == set(self.machine.groups)
        going_on = [
            group for group in self.machine.groups.values() if group.held_since is None and not group.done
        ]
        away = self.machine.registry.trajectories.away
        assert set(self.context._groups) == {group.group_id for group in going_on} | set(away)

    @rule(
        name=st.sampled_from(NAMES),
        blocks=st.integers(6, 30),
        again=st.booleans(),
        image=st.sampled_from((0, 8, 32)),
        ranks=st.sampled_from((1, 1, 2)),
    )
    def join(self, name, blocks, again, image, ranks):
        self.lose([name])
        self.incarnations += not again
        capacity = Capacity(
            kv_blocks=blocks * ranks,
            block_size=8,
            max_num_seqs=4 * ranks,
            max_model_len=200,
            image_tokens=image,
            parts=ranks,
        )
        self.send(orders.joined(name, capacity, 10 * self.incarnations + NAMES.index(name)))

    @rule(names=st.lists(st.sampled_from(NAMES), unique=True, min_size=1), died=st.booleans())
    def leave(self, names, died):
        self.lose(names)
        self.send(Left(names, died))

    def lose(self, names):
        for key in [key for key, d in self.running.items() if d.instance in names]:
            self.stale.append(self.running.pop(key))

    @rule(
        n=st.integers(1, 5),
        prompt_len=st.integers(1, 60),
        max_tokens=st.integers(1, 90),
        count=st.integers(1, 3),
        rollout=st.sampled_from(ROLLOUTS),
        trainer=st.sampled_from(("t", "t", "u")),
        again=st.integers(0, 3),
        other=st.booleans(),
        ahead=st.sampled_from((-1, -1, 0, 1)),
        image=st.sampled_from((0, 0, 4, 16)),
        missing=st.lists(st.sampled_from(IMAGES), unique=True),
        stream=st.booleans(),
    )
    def submit(
        self, n, prompt_len, max_tokens, count, rollout, trainer, again, other, ahead, image, missing, stream
    ):
        first = max(0, self.prompts - again)
        shown = {"image_tokens": image, "missing": missing if image else [], "stream": stream}
        specs = [
            events.GroupSpec(str(first + i), prompt_len, not (again and other), **shown) for i in range(count)
        ]
        self.prompts = max(self.prompts, first + count)
        self.uses += other
        self.asked[rollout] += other and not again
        version = -1 if ahead < 0 else self.machine.weight_version + ahead
        address = f"{trainer}{self.uses}".encode()
        asked = self.asked[rollout]
        self.send(
            events.GroupsSubmitted(trainer, rollout, n, max_tokens, specs, version, self.uses, asked, address)
        )

    @rule(name=st.sampled_from(IMAGES))
    def arrive(self, name):
        self.send(events.ImageArrived(name))
        assert not [group for group in self.machine.groups.values() if name in group.missing]

    @rule(data=st.data())
    def stall(self, data):
        """The store reports what has waited for too long; a group may have got its images, or be gone."""
        named = [*self.machine.groups, "r/gone"]
        some = data.draw(st.lists(st.sampled_from(named), unique=True, max_size=3))
        waited = [name for name in some if name in self.machine.groups and self.machine.groups[name].missing]
        before = set(self.machine.groups)
        self.send(events.ImagesStalled(some, "they do not come"))
        assert before - set(self.machine.groups) == set(waited)

    @rule(
        trainer=st.sampled_from(("t", "u")),
        index=st.integers(0, 2),
        added=st.integers(0, 20),
        max_tokens=st.integers(1, 40),
        again=st.booleans(),
    )
    def turn(self, trainer, index, added, max_tokens, again):
        """The next turn of a trajectory, its first, or another that its trainer has run before."""
        registry = self.machine.registry
        latest = registry.trajectories.latest.get((trainer, "/g", index), "")
        away = registry.trajectories.away.get(latest)
        earlier = away.generated if away and not again else 0
        before = self.machine.groups.get(latest)
        prompt = before.prompt_id if again and before else f"turn{self.prompts}"
        self.prompts += 1
        turn = TurnSpec(7, earlier, earlier + 100, 60.0)
        spec = events.GroupSpec(prompt, 7 + earlier + added, not again, None, "/g", index, turn)
        holding, open_before = registry.holding, set(self.machine.estimates)
        self.take_turn(trainer, f"o{trainer}", max_tokens, spec)
        opened = set(self.machine.estimates) - open_before
        assert not (
            holding and opened and away is None
        )  # only what continues is opened while others are held
        if opened and away:
            request = self.machine.requests[f"{opened.pop()}#0"]
            assert request.view.produced == earlier
            assert request.view.last_instance in ("", away.last_instance, request.instance)

    @rule(data=st.data())
    def repeat_turn(self, data):
        """A turn that was submitted before, as by an incarnation that takes all turns again."""
        registry = self.machine.registry
        if turns := [group for group in registry.groups.values() if group.turn is not None]:
            group = data.draw(st.sampled_from(turns))
            rollout, key = group.rollout, key_of(group)
            spec = events.GroupSpec(
                group.prompt_id, group.prompt_len, True, None, group.shared_id, group.first_index, group.turn
            )
            self.take_turn(rollout.trainer, rollout.rollout_id, group.max_tokens, spec)
            latest = registry.trajectories.latest.get(key, "")
            full = registry.holdings.room(rollout.share) <= 0
            assert (
                latest == group.group_id
                or group.group_id not in registry.groups  # it was held, or refused
                or group.held_since is not None
                or latest in self.machine.estimates
                or latest in registry.trajectories.returning
                or (full and group.done and not latest)
                or (group.done and not group.turn.idle_seconds)  # nobody awaits the next one
            )

    @rule(trainer=st.sampled_from(("t", "u")), name=st.sampled_from("ab"), max_tokens=st.integers(1, 40))
    def turn_that_nobody_awaits(self, trainer, name, max_tokens):
        """Of a trajectory with a name of its own, each turn in another group."""
        trajectories, open_before = self.machine.registry.trajectories, set(self.machine.estimates)
        place = trajectories.places.get(("", name, -1), "")
        prompt = f"turn{self.prompts}"
        self.prompts += 1
        turn = TurnSpec(7, 3, 100, 0.0, name)
        spec = events.GroupSpec(prompt, 20, False, None, f"/{prompt}", 0, turn)
        self.take_turn(trainer, f"o{trainer}", max_tokens, spec)
        assert not [each for each in trajectories.away.values() if each.key[2] < 0]
        for group_id in set(self.machine.estimates) - open_before:
            request = self.machine.requests[f"{group_id}#0"]
            assert request.view.last_instance in (place, request.instance)
            assert ("", name, -1) not in trajectories.places

    @rule(trainer=st.sampled_from(("t", "u")), data=st.data(), later=st.booleans())
    def end_trajectory(self, trainer, data, later):
        away = self.machine.registry.trajectories.away
        if mine := [each for each in away.values() if each.key[0] == trainer]:
            each = data.draw(st.sampled_from(mine))
            rollout, prompt = each.group_id.split("/")
            self.send(orders.cancelled("x", rollout, [prompt]))
            self.send(orders.cancelled(trainer, rollout, [], each.submission))
            if each.submission > 1:  # 0 means any
                self.send(orders.cancelled(trainer, rollout, [prompt], each.submission - 1))
            assert each.group_id in away
            self.send(orders.cancelled(trainer, rollout, [prompt], each.submission + later))
            assert each.group_id not in away

    @rule(trainer=st.sampled_from(("t", "u")))
    def lose_trajectories(self, trainer):
        self.send(events.TrainerLost(f"{trainer}address".encode()))
        assert not [e for e in self.machine.registry.trajectories.away.values() if e.key[0] == trainer]

    @rule()
    def abort(self):
        self.send(events.RolloutsAborted("new weights"))
        assert self.machine.idle

    @rule()
    def change_weights(self):
        if self.machine.idle:
            self.send(events.WeightsChanged(self.machine.weight_version + 1))

    @rule(held=st.booleans())
    def hold(self, held):
        self.send(events.SubmissionsHeld(held))

    @rule(seconds=st.sampled_from((0.5, 300.0)))
    def tick(self, seconds):
        self.now += seconds
        self.send(Tick())

    @rule()
    def restore(self):
        self.twin = again(BufferMachine(self.twin, WeightsMachine(), SleepMachine())).requests

    @rule()
    def lose_trainer(self):
        self.send(events.TrainerLost(f"t{self.uses}".encode()))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), finish=st.booleans())
    def end(self, data, finish):
        key = data.draw(st.sampled_from(sorted(self.running)))
        dispatch = self.running.pop(key)
        early = self.early[key]
        most = dispatch.max_new_tokens - early
        count = data.draw(st.integers(1, most)) if finish else most
        self.ending = (dispatch.request_id, count)
        self.send(orders.ended(dispatch.instance, *key, count, "stop" if finish else "", start=early))
        self.ending = None

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def stream(self, data):
        """A chunk goes on: its tokens are kept and sent if its group is streamed, else the chunk is lost."""
        key = data.draw(st.sampled_from(sorted(self.running)))
        dispatch = self.running[key]
        request, before = self.machine.requests[dispatch.request_id], self.kept[dispatch.request_id]
        group, rest = request.group, request.view.remaining  # the last ones come as a chunk's end alone
        count = data.draw(st.sampled_from((0, rest, *range(1, dispatch.max_new_tokens - self.early[key]))))
        self.ending = (dispatch.request_id, count)
        self.send(orders.streamed(dispatch.instance, *key, count, self.early[key]))
        self.ending = None
        assert dispatch.stream == group.stream
        if not group.stream or count in (0, rest):
            assert key not in self.running
        elif key in self.running:  # else there was no room for its tokens
            self.early[key] += count
            assert self.kept[dispatch.request_id] == before + count

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ends=st.booleans(), off=st.sampled_from((-1, 1, 3)))
    def lose_tokens(self, data, ends, off):
        """Tokens of a chunk were lost on their way, or come again: nothing is kept, and the chunk runs again."""
        key = data.draw(st.sampled_from(sorted(self.running)))
        dispatch, before = self.running[key], dict(self.kept)
        make = orders.ended if ends else orders.streamed
        if ends:
            del self.running[key]
        self.send(make(dispatch.instance, *key, 1, start=self.early[key] + off))
        assert self.kept == before
        assert key not in self.running

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def late(self, data):
        dispatch = data.draw(st.sampled_from(self.stale))
        before = dict(self.kept)
        self.send(orders.ended(dispatch.instance, dispatch.request_id, dispatch.attempt, 1))
        self.send(orders.streamed(dispatch.instance, dispatch.request_id, dispatch.attempt, 1))
        assert self.kept == before

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fatal=st.booleans())
    def reject(self, data, fatal):
        key = data.draw(st.sampled_from(sorted(self.running)))
        dispatch = self.running.pop(key)
        self.send(orders.rejected(dispatch.instance, *key, fatal, "no"))

    @rule(data=st.data())
    def acknowledge(self, data):
        if done := [group for group in self.machine.groups.values() if group.done]:
            group = data.draw(st.sampled_from(done))
            rollout = group.rollout
            self.send(orders.acknowledged("x", rollout.rollout_id, [group.prompt_id]))
            self.send(orders.acknowledged(rollout.trainer, rollout.rollout_id, [group.prompt_id], 10**6))
            assert group.group_id in self.machine.groups
            self.send(
                orders.acknowledged(rollout.trainer, rollout.rollout_id, [group.prompt_id], group.submission)
            )
            assert group.group_id not in self.machine.groups

    @rule(data=st.data(), use=st.booleans())
    def cancel(self, data, use):
        live = [each for each in self.machine.groups.values() if not each.done and not each.rollout.open]
        if live:
            group = data.draw(st.sampled_from(live))
            rollout = group.rollout
            self.send(orders.cancelled("x", rollout.rollout_id, []))
            self.send(orders.cancelled(rollout.trainer, rollout.rollout_id, [], 10**6))
            assert group.group_id in self.machine.groups
            number = rollout.submission if use else 0
            self.send(orders.cancelled(rollout.trainer, rollout.rollout_id, [group.prompt_id], number))
            assert group.group_id not in self.machine.groups

    @rule(pinned=st.integers(0, 6), name=st.sampled_from(NAMES))
    def report(self, pinned, name):
        self.send(events.EngineReported(name, pinned))

    @rule(tokens=st.lists(st.floats(1, 90), min_size=1, max_size=5), spread=st.sampled_from((0.0, 0.5)))
    def estimate(self, tokens, spread):
        groups = zip(self.machine.groups, tokens, strict=False)
        self.send(events.EstimatesChanged({group: Estimate(number, spread) for group, number in groups}))

    @invariant()
    def invariants(self):
        if hasattr(self, "machine"):
            check(self.machine)
            check_statistics(self.statistics, self.machine, self.opened, self.dispatched - self.dropped)

    def teardown(self):
        """With a big engine and no more faults, everything that was taken ends."""
        if not hasattr(self, "machine"):
            return
        self.lose(NAMES)
        self.send(Left(NAMES))
        self.send(events.SubmissionsHeld(False))
        big = Capacity(kv_blocks=500, block_size=8, max_num_seqs=64, max_model_len=4096, image_tokens=32)
        for name in IMAGES:
            self.send(events.ImageArrived(name))
        self.send(orders.joined("z", big))
        self.now += 60.0
        self.send(Tick())
        for _ in range(10_000):
            if not self.running:
                break
            key = next(iter(self.running))
            dispatch = self.running.pop(key)
            count = dispatch.max_new_tokens - self.early[key]
            self.ending = (dispatch.request_id, count)
            self.send(orders.ended(dispatch.instance, *key, count, start=self.early[key]))
        assert not self.machine.requests
        self.now += 60.0
        self.send(Tick())
        assert self.machine.idle
        version = self.machine.weight_version
        assert all(group.done or group.awaits > version for group in self.machine.groups.values())
        assert not any(view.closed for view in self.machine.instances.values())
        check(self.machine)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_whatever_happens(policy):
    run_state_machine_as_test(
        lambda: BufferModel(policy), settings=settings(max_examples=20, stateful_step_count=60)
    )
