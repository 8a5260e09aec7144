"""The buffer's three machines as one: requests, weights and sleep. Pure: events in, instructions out.

Invariants (tests/property/test_weights_and_sleep.py, tests/chaos):
- the state is a function of the events and their times: nothing else is read;
- an instruction of one machine to another is carried out before all instructions that follow it;
- an engine that left, or was removed, is unknown to all three machines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from seer.common import wire
from seer.common.sleep import SleepState
from seer.services.buffer import sleep_machine
from seer.services.buffer.events import (
    Changed,
    Drained,
    FromEngine,
    FromTrainer,
    Joined,
    Left,
    SleeperLost,
    Tick,
    ToTrainer,
    Weights,
)
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.sleep_machine import SleepMachine
from seer.services.buffer.weights import instructions as weight_instructions
from seer.services.buffer.weights import weights_machine
from seer.services.buffer.weights.weights_machine import WeightsMachine

Event = events.Event

Logged = instructions.Logged | ToTrainer | sleep_machine.GiveUp
Instruction = Logged | instructions.Implied
"""Instructions that are not carried out by one of the three machines."""

_AnyInstruction = instructions.Instruction | weight_instructions.Instruction | sleep_machine.Instruction
_Step = Callable[[float], Sequence[_AnyInstruction]]
"""Applies one event to one machine, at the given time."""


class BufferMachine:
    """`engines`: by name, the last registration of each engine."""

    def __init__(self, requests: RequestMachine, weights: WeightsMachine, sleep: SleepMachine) -> None:
        self.requests, self.weights, self.sleep = requests, weights, sleep
        self.engines: dict[str, Joined] = {}
        self._idle = requests.idle
        self._changed = False
        self._shared = self._shared_state()

    def apply(self, event: Event, now: float) -> list[Instruction]:
        """Apply one event at `now` (monotonic seconds) and return what to do, in order."""
        out: list[Instruction] = []
        todo: deque[_Step | _AnyInstruction] = deque(self._steps(event))
        while todo:
            while todo:
                item = todo.popleft()
                more = item(now) if callable(item) else self._carry_out(item, out)
                todo.extendleft(reversed(more))
            todo.extend(self._follow_changes())
        return out

    # --- events to machines ----------------------------------------------------------------

    def _steps(self, event: Event) -> list[_Step]:
        """Return the steps that handle an event, in order."""
        match event:
            case events.ChunkEnded() | events.TokensArrived():  # most events by far
                return [self._to_requests(event)]
            case Joined():
                return self._joined(event)
            case Left():
                return self._left(event)
            case Tick():
                return [self._to_requests(event), self._to_sleep(event), self._to_weights(event)]
            case Drained():
                return [self._to_requests(event), self._to_weights(event)]
            case FromEngine(message=wire.Slept(dropped=True)):
                return [self._to_weights(event), self._to_sleep(event)]
            case FromEngine(message=wire.Slept()) | FromTrainer(message=wire.Sleep()) | SleeperLost():
                return [self._to_sleep(event)]
            case FromEngine(message=wire.WeightsPrepared() | wire.WeightsLoaded()):
                return [self._to_weights(event)]
            case FromTrainer(message=wire.UpdateWeights()):
                return [self._to_weights(event)]
        return [self._to_requests(event)]

    def _joined(self, event: Joined) -> list[_Step]:
        known = self.engines.get(event.instance)
        # The same incarnation or another one: it no longer runs what was dispatched before.
        gone = self._steps(Left([event.instance], known.incarnation != event.incarnation)) if known else []
        self.engines[event.instance] = event
        # Only the weights machine knows whether it has to load; sleep is decided after that.
        return [*gone, self._to_sleep(event), self._to_weights(event), self._to_sleep(Changed())]

    def _left(self, event: Left) -> list[_Step]:
        for name in event.instances:
            self.engines.pop(name, None)
        return [self._to_requests(event), self._to_sleep(event), self._to_weights(event)]

    def _to_requests(self, event: events.Event) -> _Step:
        return lambda now: self.requests.apply(event, now)

    def _to_weights(self, event: weights_machine.Event) -> _Step:
        def step(now: float) -> Sequence[_AnyInstruction]:
            self._changed = True
            rests = self.sleep
            return self.weights.apply(
                event, now, idle=self.requests.idle, awake=rests.awake, weights_awake=rests.weights_awake,
                asleep=rests.wanted is SleepState.ASLEEP,
            )  # fmt: skip

        return step

    def _to_sleep(self, event: sleep_machine.Event) -> _Step:
        def step(now: float) -> Sequence[_AnyInstruction]:
            self._changed = True
            return self.sleep.apply(event, now, idle=self.requests.idle, loading=self.weights.loading)

        return step

    # --- instructions of one machine to another ----------------------------------------------

    def _carry_out(self, item: _AnyInstruction, out: list[Instruction]) -> Sequence[_Step]:
        """Return the steps that carry out an instruction; if it is for the server, append it to `out`."""
        match item:
            case weight_instructions.Admit(name):
                live = self.weights.live or Weights(0, "")
                changed = events.WeightsChanged(live.version, live.digest, self.weights.changed_by)
                return [self._to_requests(changed), self._to_requests(self.engines[name])]
            case weight_instructions.Expel(name):
                return [self._to_requests(Left([name]))]
            case weight_instructions.Hold() | weight_instructions.Release():
                return [self._hold()]
            case weight_instructions.Abort(whose):
                return [self._to_requests(events.RolloutsAborted(f"aborted by a weight update{whose}"))]
            case sleep_machine.GiveUp(name):
                out.append(item)
                return self._steps(Left([name]))
        out.append(item)
        return []

    def _hold(self) -> _Step:
        held = self.weights.updating or self.weights.reloading or self.sleep.held
        return self._to_requests(events.SubmissionsHeld(held))

    def _shared_state(self) -> tuple[object, ...]:
        """Return the state of each machine that another one depends on."""
        weights, rests = self.weights, self.sleep
        return self._idle, weights.loading, weights.reloading, rests.awake, rests.weights_awake, rests.held

    def _follow_changes(self) -> list[_Step]:
        """Return the steps due if that state changed, once all other steps are done."""
        idle = self.requests.idle
        if idle == self._idle and not self._changed:
            return []  # the usual case: most events are ends of chunks
        self._idle, self._changed = idle, False
        before, self._shared = self._shared, self._shared_state()
        if before == self._shared:
            return []
        return [self._hold(), self._to_sleep(Changed()), self._to_weights(Changed())]
