"""One rollout in virtual time: the production's buffer and context machines with simulated engines.

Both machines are the production code: `services/buffer/requests/request_machine.py` and
`services/context/context_machine.py` get the events that their servers would pass to them. Their
instructions are performed on `Instance`s. Delays are modelled: of a dispatch, of publishing estimates, and
of KV that a chunk fetches from the pool (sim/pool.py).

Invariants (tests/unit/test_sim_cluster.py asserts them):
- every response ends once, with the length that the workload says, under every policy;
- the same workload, policy and seed give the same result, bit for bit;
- no run ends before its lower bound, and nothing is preempted under a policy with admission.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from seer.common import wire
from seer.common.policy.length import ESTIMATORS
from seer.common.policy.schedule import Policy
from seer.services.buffer.events import Joined, ToIncarnation
from seer.services.buffer.requests import events, instructions, state
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.context.context_machine import EstimateMachine
from seer.sim.drafting import Drafting, RecordedDrafting, kind_of
from seer.sim.instance import Chunk, Instance
from seer.sim.network import Link, Network
from seer.sim.pool import Pool
from seer.sim.ranks import RankedInstance
from seer.sim.workload import Workload

PUBLISH_SECONDS = 0.05
"""How long the context service collects changes: `PUBLISH_SECONDS` of its server."""

STATUS_SECONDS = 1.0
"""From a report of an engine to the next one in the log, at least: a real engine's are so often."""

SAMPLES = 400
"""Points of each curve over time."""


@dataclass(slots=True)
class Sample:
    """The state of all instances at one time, ordered by name."""

    time: float
    running: list[int]
    kv_share: list[float]


@dataclass(slots=True)
class Outcome:
    """The result of a rollout. Times in seconds since submission; `finished` (of all responses) is sorted."""

    total: float
    tail: float
    tokens: int
    counts: dict[str, float]
    finished: list[float]
    samples: list[Sample] = field(default_factory=list)
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)  # request, instance, from, to
    prediction: dict[str, float] = field(default_factory=dict)


Record = Callable[[float, events.Event, Sequence[instructions.Instruction]], None]


class Cluster:
    """See the module's docstring; `run` once. `every`: seconds between samples, 0: none, nor spans.

    `record`, if set, is told of each event, when it was, and what the buffer's machine answered.
    """

    def __init__(
        self,
        load: Workload,
        policy: Policy,
        lengths: list[list[int]],
        chunk_size: int,
        drafts: bool = False,
        every: float = 0.0,
    ) -> None:
        self.load, self.every = load, every
        self.record: Record | None = None
        self.lengths = {f"r/{g}#{i}": n for g, group in enumerate(lengths) for i, n in enumerate(group)}
        self.totals = self.lengths  # of the whole response that a request is part of
        self._sizes = [len(group) for group in lengths]
        self._responses = sum(self._sizes)
        self.buffer = RequestMachine(
            policy, state.Limits(chunk_size=chunk_size, max_requests=self._responses)
        )
        self.context = EstimateMachine(ESTIMATORS[policy.estimator]())
        self.drafts = drafts
        recorded = RecordedDrafting(load.acceptance) if load.acceptance else Drafting()
        drafting = recorded if drafts else None
        self.instances: dict[str, Instance] = {
            name: self._instance(name, drafting, policy)
            for name in (f"e{index:04}" for index in range(load.instances))
        }
        self.pool = Pool(load, self._link_wakes) if load.pool else None
        self._numbers = {name: number for number, name in enumerate(self.instances)}
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()
        self._wakes = dict.fromkeys(self.instances, math.inf)
        self._publishing = False
        self._began: dict[str, int] = {}  # how many responses of each group have started
        self._since: dict[str, float] = {}
        self._prompts: set[tuple[str, str]] = set()  # instances, and groups of which some response ran there
        self.counts = dict.fromkeys(("pulled_tokens", "prefilled_tokens"), 0.0)
        self._reported: dict[str, float] = {}  # by instance: when it last did
        self._outcome = Outcome(0.0, 0.0, sum(self.lengths.values()), self.counts, [])

    def _instance(self, name: str, drafting: Drafting | None, policy: Policy) -> Instance:
        load = self.load
        if load.ranks == 1:
            return Instance(name, load.model, drafting)
        return RankedInstance(name, load.model, drafting, load.ranks, gates=policy.admission)

    def run(self) -> Outcome:
        """Run until the last response has finished; return the result."""
        for instance in self.instances.values():
            register = wire.Register(capacity=self.load.capacity, weight_version=0)
            self._tell(Joined(instance.name, register))
        self._submit()
        if self.every:
            self._sample()
        while len(self._outcome.finished) < self._responses:
            self.now, _, action, values = heapq.heappop(self._events)
            action(*values)
        return self._close()

    def _submit(self) -> None:
        by_size: dict[int, list[events.GroupSpec]] = {}
        prompts = self.load.prompts or (self.load.prompt,) * len(self._sizes)
        for number, (size, prompt) in enumerate(zip(self._sizes, prompts, strict=True)):
            by_size.setdefault(size, []).append(events.GroupSpec(str(number), prompt))
        for size, specs in by_size.items():
            self._tell(events.GroupsSubmitted("trainer", "r", size, self.load.cap, specs))

    def _response_of(self, request_id: str) -> str:
        """Return which response a request is of; what instances cache is kept by it."""
        return request_id

    def _is_last(self, request_id: str) -> bool:
        """Return whether a response ends with this request."""
        return True

    def _delivered(self, request_id: str) -> None:
        """Do what a trainer does when a request has ended."""

    def _close(self) -> Outcome:
        outcome = self._outcome
        outcome.total = self.now
        outcome.tail = self.now - outcome.finished[math.ceil(0.9 * len(outcome.finished)) - 1]
        engines = self.instances.values()
        outcome.counts |= {
            "chunks": self.buffer.counters["chunks"],
            "migrations": self.buffer.counters["migrations"],
            "preemptions": sum(engine.preempted for engine in engines),
            "recomputed_tokens": sum(engine.recomputed for engine in engines),
            "busy": sum(engine.busy_seconds for engine in engines) / (len(engines) * self.now),
        }
        if ranked := [engine for engine in engines if isinstance(engine, RankedInstance)]:
            dummies, steps = (sum(getattr(each, name) for each in ranked) for name in ("dummies", "steps"))
            outcome.counts["dummies"] = dummies / steps
        return outcome

    def _at(self, time: float, action: Callable[..., None], *values: object) -> None:
        heapq.heappush(self._events, (time, next(self._order), action, values))

    # --- instructions of the machines --------------------------------------------------------

    def _tell(self, event: events.Event) -> None:
        answered = self.buffer.apply(event, self.now)
        if self.record is not None:
            self.record(self.now, event, answered)
        for item in answered:
            match item:
                case instructions.Dispatch():
                    self._dispatch(item)
                case wire.GroupOpened() | wire.RequestProgress() | wire.GroupClosed():
                    self._learn(item)
                case ToIncarnation(message=wire.Refused(message=why)):
                    raise ValueError(f"the buffer refused prompts: {why}")

    def _learn(self, event: wire.BufferPublished) -> None:
        self.context.apply(event)
        if not self._publishing and self.context.dirty:
            self._publishing = True
            self._at(self.now + PUBLISH_SECONDS, self._publish)

    def _publish(self) -> None:
        self._publishing = False
        if changes := self.context.changes():
            self._tell(events.EstimatesChanged(changes))

    def _dispatch(self, item: instructions.Dispatch) -> None:
        request = self.buffer.requests[item.request_id]
        view, instance = request.view, self.instances[item.instance]
        chunk = Chunk(
            item.request_id,
            item.attempt,
            float(view.context),
            view.prompt_len + min(view.generated + item.max_new_tokens, self.lengths[item.request_id]),
            most=view.context + item.max_new_tokens + self.load.model.draft_tokens + 1,
        )
        group = request.group.shared_id or request.group.group_id
        self._began[group] = self._began.get(group, 0) + (not view.produced)
        if self.drafts:
            chunk.kind = kind_of(self._began[group] - 1, item.probe)
        self._at(self.now + self.load.dispatch, self._bring, view.context, chunk, instance)

    def _bring(self, context: int, chunk: Chunk, instance: Instance) -> None:
        """Have a context's KV: cached, from the pool or computed; then its chunk begins."""
        response, number = self._response_of(chunk.request_id), self._numbers[instance.name]
        cached = instance.take(response) or self._shared(chunk.request_id, instance.name)
        pulled = self.pool.found(number, response, cached, self.now) if self.pool else 0.0
        chunk.prefill = context - cached - pulled
        self.counts["prefilled_tokens"] += chunk.prefill
        self.counts["pulled_tokens"] += pulled
        if self.pool and pulled:
            self.pool.fetch(number, pulled, self.now, lambda at: self._add(instance, chunk))
        else:
            self._add(instance, chunk)

    def _shared(self, request_id: str, instance: str) -> float:
        """Return how many tokens of a recorded prompt an instance has of another response to it."""
        if not self.load.prompts:
            return 0.0
        group, size = self.buffer.requests[request_id].group, self.load.model.block_size
        known = (instance, group.group_id) in self._prompts
        self._prompts.add((instance, group.group_id))
        return float((group.prompt_len - 1) // size * size) if known else 0.0

    def _link_wakes(self, network: Network, link: Link) -> None:
        time = link.next_event()
        self._wakes[link.name] = time
        if time < math.inf:
            self._at(time, self._wake_link, network, link, time)

    def _wake_link(self, network: Network, link: Link, time: float) -> None:
        if self._wakes[link.name] == time:
            network.settle(link, self.now)

    # --- engines -----------------------------------------------------------------------------

    def _add(self, instance: Instance, chunk: Chunk) -> None:
        self._settle(instance)
        if self.every:
            self._since[chunk.request_id] = self.now
        if self.pool and chunk.prefill:
            number = self._numbers[instance.name]
            self.pool.computed(number, chunk.prefill, instance.running, instance.step_seconds)
        instance.add(chunk, self.now)
        self._wake_at(instance)

    def _wake_at(self, instance: Instance) -> None:
        time = instance.next_event()
        self._wakes[instance.name] = time
        if time < math.inf:
            self._at(time, self._wake, instance, time)

    def _wake(self, instance: Instance, time: float) -> None:
        if self._wakes[instance.name] == time:
            self._settle(instance)
            self._wake_at(instance)

    def _settle(self, instance: Instance) -> None:
        for chunk in instance.settle(self.now):
            view = self.buffer.requests[chunk.request_id].view
            generated = chunk.end - view.prompt_len
            done = generated == self.lengths[chunk.request_id]
            if self.every:
                span = (chunk.request_id, instance.name, self._since[chunk.request_id], self.now)
                self._outcome.spans.append(span)
            response = self._response_of(chunk.request_id)
            if done and self._is_last(chunk.request_id):
                self._outcome.finished.append(self.now)
            else:
                instance.leave(response, chunk.length)
                if self.pool:
                    self.pool.save(self._numbers[instance.name], response, chunk.end, self.now)
            finish = "stop" if done else ""
            result = wire.ChunkResult(
                chunk.request_id, chunk.attempt, generated - view.generated, finish, "", chunk.preemptions
            )
            self._tell(events.ChunkEnded(instance.name, result))
            if done:
                self._delivered(chunk.request_id)
        if (
            self.record is not None
            and self.now >= self._reported.get(instance.name, -math.inf) + STATUS_SECONDS
        ):
            self._reported[instance.name] = self.now
            self._tell(events.EngineReported(instance.name, generated_tokens=int(instance.generated)))

    def _sample(self) -> None:
        engines = self.instances.values()
        for engine in engines:
            engine.advance(self.now)
        share = [engine.kv_tokens / self.load.model.kv_tokens for engine in engines]
        self._outcome.samples.append(Sample(self.now, [engine.running for engine in engines], share))
        self._at(self.now + self.every, self._sample)
