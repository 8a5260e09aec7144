"""The buffer's three machines as one: requests, weights and sleep. Pure: events in, instructions out.

Invariants (tests/property/test_weights_and_sleep.py, tests/chaos):
- the state is a function of the events and their times: nothing else is read;
- what one machine instructs another is done before anything that was instructed after it;
- an engine that is gone is gone for all three machines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from seer.services.buffer import sleep
from seer.services.buffer.events import Drained, Joined, Left, Tick, Weights
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.machine import RequestMachine
from seer.services.buffer.sleep import SleepMachine
from seer.services.buffer.weights import events as weight_events
from seer.services.buffer.weights import instructions as weight_instructions
from seer.services.buffer.weights.machine import WeightsMachine

Event = events.Event | weight_events.Event | sleep.Event

Instruction = (
    instructions.Instruction
    | weight_instructions.Prepare
    | weight_instructions.Discard
    | weight_instructions.Load
    | weight_instructions.Report
    | weight_instructions.Fail
    | sleep.Instruction
)
"""What others than the three machines have to do."""

_Any = instructions.Instruction | weight_instructions.Instruction | sleep.Instruction
_Step = Callable[[float], Sequence[_Any]]
"""One machine's turn with one event, at a time."""

_OF_WEIGHTS = (weight_events.UpdateAsked, weight_events.Prepared, weight_events.Loaded)
_OF_SLEEP = (sleep.SleepAsked, sleep.SleepAnswered)


class BufferMachine:
    """`engines` has what each engine that is there said when it registered last."""

    def __init__(self, requests: RequestMachine, weights: WeightsMachine, sleep: SleepMachine) -> None:
        self.requests, self.weights, self.sleep = requests, weights, sleep
        self.engines: dict[str, Joined] = {}
        self._idle = not requests.requests
        self._stirred = False
        self._seen = self._facts()

    def apply(self, event: Event, now: float) -> list[Instruction]:
        """Apply one event at `now` (monotonic seconds) and return what to do, in order."""
        out: list[Instruction] = []
        todo: deque[_Step | _Any] = deque(self._steps(event))
        while todo:
            while todo:
                item = todo.popleft()
                more = item(now) if callable(item) else self._follow(item, out)
                todo.extendleft(reversed(more))
            todo.extend(self._news())
        return out

    # --- who hears of what -----------------------------------------------------------------

    def _steps(self, event: Event) -> list[_Step]:
        """Return the turns that an event brings, in order."""
        match event:
            case Joined():
                return self._joined(event)
            case Left():
                return self._left(event)
            case Tick():
                return [self._to_requests(event), self._to_sleep(event), self._to_weights(event)]
            case Drained():
                return [self._to_requests(event), self._to_weights(event)]
        if isinstance(event, _OF_WEIGHTS):
            return [self._to_weights(event)]
        if isinstance(event, _OF_SLEEP):
            return [self._to_sleep(event)]
        return [self._to_requests(event)]

    def _joined(self, event: Joined) -> list[_Step]:
        known = self.engines.get(event.instance)
        # Whatever life it is, it holds nothing of before.
        gone = self._steps(Left([event.instance], known.life != event.life)) if known else []
        self.engines[event.instance] = event
        # Whether it has to load, and so to be awake, is known once the weights machine knows it.
        return [*gone, self._to_sleep(event), self._to_weights(event), self._to_sleep(Tick())]

    def _left(self, event: Left) -> list[_Step]:
        for name in event.instances:
            self.engines.pop(name, None)
        return [self._to_requests(event), self._to_sleep(event), self._to_weights(event)]

    def _to_requests(self, event: events.Event) -> _Step:
        return lambda now: self.requests.apply(event, now)

    def _to_weights(self, event: weight_events.Event) -> _Step:
        def step(now: float) -> Sequence[_Any]:
            self._stirred = True
            return self.weights.apply(event, now, idle=not self.requests.requests, awake=self.sleep.awake)

        return step

    def _to_sleep(self, event: sleep.Event) -> _Step:
        def step(now: float) -> Sequence[_Any]:
            self._stirred = True
            return self.sleep.apply(event, now, idle=not self.requests.requests, loading=self.weights.loading)

        return step

    # --- what one machine has to do with another ---------------------------------------------

    def _follow(self, item: _Any, out: list[Instruction]) -> Sequence[_Step]:
        """Return the turns that an instruction brings; what is for others goes to `out`."""
        match item:
            case weight_instructions.Admit(name):
                live = self.weights.live or Weights(0, "")
                changed = events.WeightsChanged(live.version, live.digest)
                return [self._to_requests(changed), self._to_requests(self.engines[name])]
            case weight_instructions.Expel(name):
                return [self._to_requests(Left([name]))]
            case weight_instructions.Hold() | weight_instructions.Release():
                return [self._hold()]
            case weight_instructions.Abort():
                return [self._to_requests(events.RolloutsAborted("aborted by a weight update"))]
            case sleep.GiveUp(name):
                out.append(item)
                return self._steps(Left([name]))
        out.append(item)
        return []

    def _hold(self) -> _Step:
        return self._to_requests(events.SubmissionsHeld(self.weights.updating or self.sleep.held))

    def _facts(self) -> tuple[object, ...]:
        """Return what one machine must know of another."""
        return self._idle, self.weights.loading, self.sleep.awake, self.sleep.held

    def _news(self) -> list[_Step]:
        """Return the turns that other machines' states bring, once nothing else is to be done."""
        idle = not self.requests.requests
        if idle == self._idle and not self._stirred:
            return []  # as after most events, which are chunks' ends
        self._idle, self._stirred = idle, False
        before, self._seen = self._seen, self._facts()
        if before == self._seen:
            return []
        return [self._hold(), self._to_sleep(Tick()), self._to_weights(Tick())]
