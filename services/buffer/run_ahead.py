"""Run-ahead: prompts that trainers will submit next, generated on idle engines for the sake of their drafts.

What engines generate goes to the dgds, which remembers it for the prompt's next group. Here it is dropped.
An instance runs chunks of requests or of run-ahead, never both; the machines do not know of run-ahead.

Invariants (test_run_ahead.py of tests/unit and tests/cluster, tests/property/test_weights_and_sleep.py):
- run-ahead begins only on an instance that runs nothing else, while no request waits, no group is held, no
  trajectory is away, and nothing is held back by an update, sleep, or the end of the buffer;
- the order to drop it goes out before any other order that follows from the same event to the instance, and
  before all others where its trainer submits or is lost, an engine that runs some is lost, or submissions are
  held;
- responses run a chunk at a time, in turn, under names that no request has: the first tokens of all come
  first, as these are the most alike to what is submitted. What is dropped does not come again;
- tokens are kept for a response's next chunk alone and not sent to trainers, and no estimate, count or time
  of a request depends on them. A buffer that restarts has forgotten all of it;
- memory is bounded: of responses that did not end there are at most `max_requests` of a trainer, `ALL` times
  that of all; those that wait have at most `MAX_TOKENS`: what is beyond ends where it stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from seer.common import ids, wire
from seer.common.errors import InvalidField
from seer.common.policy.chunk_size import default_chunk
from seer.common.policy.fleet import Fleet, InstanceView
from seer.services.buffer.buffer_machine import Event, Instruction
from seer.services.buffer.events import Joined, Left
from seer.services.buffer.requests import events
from seer.services.buffer.requests.admission import never_fits
from seer.services.buffer.requests.holdings import ALL
from seer.services.buffer.requests.instructions import Dispatch
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.response_store import SubmittedPrompt
from seer.services.buffer.rollout_ids import SEPARATOR

MAX_PROMPT_ID = wire.MAX_ID - 32
"""Characters of a prompt's id: a request's id has the number of the naming, and an index, besides."""

MAX_TOKENS = 2**24
"""Generated tokens of all responses that wait for their next chunk: 64 MiB."""

_NO_TOKENS = np.zeros(0, np.int32)

Order = tuple[str, wire.RunChunk | wire.DropChunk]
"""An instance, and what it is to do."""


@dataclass(slots=True)
class _Response:
    """`output`: what it has so far."""

    group_id: str
    prompt: SubmittedPrompt
    index: int
    output: wire.Tokens = field(default_factory=lambda: _NO_TOKENS)

    @property
    def remaining(self) -> int:
        """How many tokens it may still have."""
        return self.prompt.sampling.max_tokens - len(self.output)


@dataclass(slots=True)
class _Work:
    """What a trainer named last; `held`: tokens that responses which wait have so far."""

    address: bytes
    rollout_id: str
    waiting: deque[_Response] = field(default_factory=deque)
    running: int = 0
    held: int = 0

    @property
    def count(self) -> int:
        """Responses that did not end."""
        return len(self.waiting) + self.running


@dataclass(frozen=True, slots=True)
class _Run:
    trainer: str
    attempt: int
    blocks: int
    response: _Response


class RunAhead:
    """See the module's docstring. Call `take` after every other method, and send what it returns."""

    def __init__(self, requests: RequestMachine) -> None:
        self._requests, self._registry = requests, requests.registry
        self._number = requests.first_attempt  # no other incarnation of the buffer has numbers near
        self._works: dict[str, _Work] = {}  # by trainer
        self._running: dict[str, dict[str, _Run]] = {}  # by instance and request id
        self._fleet = Fleet()  # the instances that run some, with what it has there
        self._orders: list[Order] = []

    @property
    def addresses(self) -> set[bytes]:
        """The incarnations of trainers whose prompts these are."""
        return {work.address for work in self._works.values()}

    def take(self) -> Sequence[Order]:
        """Return the orders that are due, in order."""
        orders, self._orders = self._orders, []
        return orders

    def name(
        self, trainer: str, address: bytes, asked: wire.NextPrompts, prompts: Mapping[str, SubmittedPrompt]
    ) -> None:
        """Take prompts, in place of those of another rollout id. Raises `InvalidField`, and takes none."""
        known = self._works.get(trainer)
        if known is not None and (known.rollout_id, known.address) != (asked.rollout_id, address):
            known = None
        self._check(trainer, asked, prompts, known.count if known else 0)
        if known is None:
            self._end([trainer])
            known = self._works[trainer] = _Work(address, asked.rollout_id)
        self._number += 1
        rollout = f"{SEPARATOR}{self._number}"  # no id of a trainer's begins like that
        groups = [(ids.group_id(rollout, name), prompt) for name, prompt in prompts.items()]
        known.waiting.extend(_Response(*group, index) for index in range(asked.n) for group in groups)

    def _check(
        self, trainer: str, asked: wire.NextPrompts, prompts: Mapping[str, SubmittedPrompt], known: int
    ) -> None:
        if any((asked.images, asked.turns, asked.sessions, asked.groups)):
            fix = "run-ahead takes prompts of text, each a group of its own: name those alone"
            raise InvalidField("prompts", len(prompts), fix)
        most, count = self._requests.limits.max_requests, known + asked.n * len(prompts)
        others = sum(work.count for name, work in self._works.items() if name != trainer)
        if count > most or others + count > ALL * most:
            fix = f"run-ahead takes at most {most} responses of a trainer, {ALL * most} of all: name fewer"
            raise InvalidField("prompts", count, f"{fix}, or raise buffer.max_requests")
        name = max(prompts, key=len, default="")
        if len(name) > MAX_PROMPT_ID:
            raise InvalidField("prompt_ids", name, f"give at most {MAX_PROMPT_ID} characters")
        longest = max((len(each.tokens) for each in prompts.values()), default=1)
        if self._requests.instances and (
            problem := never_fits(self._requests.instances, longest, asked.sampling.max_tokens)
        ):
            raise InvalidField("prompts", longest, problem)

    # --- the end of it ---------------------------------------------------------------------

    def before(self, event: Event, out: Iterable[Instruction]) -> None:
        """End what an event ends, before the instructions that the machines answered it with."""
        if not self._works:
            return  # then nothing runs either
        self._end(self._ended_by(event))
        for item in out:
            if isinstance(item, Dispatch) and item.instance in self._running:
                self._clear(item.instance)

    def _ended_by(self, event: Event) -> list[str]:
        """Return the trainers whose run-ahead ends."""
        lost: Sequence[str] = ()
        match event:
            case events.GroupsSubmitted(trainer) if trainer in self._works:
                return [trainer]
            case events.TrainerLost(address):
                return [name for name, work in self._works.items() if work.address == address]
            case Joined(instance):
                lost = [instance]
            case Left(instances):
                lost = instances
        # An engine may be lost by what it ran: that is not tried on another.
        held = self._registry.holding or self._registry.draining
        return list(self._works) if held or any(name in self._running for name in lost) else []

    def _end(self, trainers: Iterable[str]) -> None:
        """Forget what these trainers named, and drop what runs of it."""
        ended = {trainer for trainer in trainers if self._works.pop(trainer, None) is not None}
        for instance in list(self._running) if ended else ():
            self._clear(instance, ended)

    def _clear(self, instance: str, trainers: Iterable[str] | None = None) -> None:
        """Drop what runs on an instance, of these trainers or of all."""
        for request_id, run in list(self._running[instance].items()):
            if trainers is None or run.trainer in trainers:
                self._orders.append((instance, wire.DropChunk(request_id=request_id, attempt=run.attempt)))
                self._release(instance, request_id)

    def _release(self, instance: str, request_id: str) -> None:
        run = self._running[instance].pop(request_id)
        self._fleet.release(instance, run.blocks, request_id)
        if not self._running[instance]:
            del self._running[instance]
            self._fleet.remove(instance)
        if (work := self._works.get(run.trainer)) is not None:
            work.running -= 1
            if not work.count:
                del self._works[run.trainer]

    def ended(self, instance: str, request_id: str, attempt: int, tokens: wire.Tokens | None = None) -> bool:
        """Take the end of a chunk, and begin others there; return whether it is one of run-ahead.

        `tokens`: the chunk's, if its response goes on.
        """
        run = self._running.get(instance, {}).get(request_id)
        if run is None or run.attempt != attempt:
            return False
        if tokens is not None and len(tokens):
            self._go_on(run, tokens)
        self._release(instance, request_id)
        self.fill([instance])
        return True

    def _go_on(self, run: _Run, tokens: wire.Tokens) -> None:
        """Have a response wait for its next chunk, if it has one."""
        response, work = run.response, self._works[run.trainer]
        response.output = np.concatenate([response.output, tokens])
        held = sum(each.held for each in self._works.values())
        if response.remaining > 0 and held + len(response.output) <= MAX_TOKENS:
            work.waiting.append(response)
            work.held += len(response.output)

    # --- its beginning -----------------------------------------------------------------------

    def fill(self, instances: Iterable[str]) -> None:
        """Begin responses on those of these instances that run no request's chunk, while there is room."""
        registry = self._registry
        if not self._works or registry.holding or registry.draining:
            return
        if self._requests.waiting or registry.held or registry.trajectories.away:
            return
        idle: deque[InstanceView] = deque()
        for name in instances:
            view = self._requests.instances.get(name)
            if view is not None and not (view.chunks or view.closed):
                idle.append(view)
        while idle:
            if self._begin_one(idle[0]):
                idle.rotate(-1)  # one on each in turn
            else:
                idle.popleft()

    def _begin_one(self, idle: InstanceView) -> bool:
        """Begin the chunk that goes next; return whether there is one, with room for it there."""
        waiting = [(work.running, trainer) for trainer, work in self._works.items() if work.waiting]
        if not waiting:
            return False
        trainer = min(waiting)[1]
        name, work = idle.name, self._works[trainer]
        response = work.waiting[0]
        context = len(response.prompt.tokens) + len(response.output)
        size = self._requests.limits.chunk_size or default_chunk(response.prompt.sampling.max_tokens)
        chunk = min(size, response.remaining)
        if name in self._fleet:
            self._fleet.pin(name, idle.pinned_blocks)
        here = self._fleet.get(name, InstanceView(name, idle.capacity, pinned_blocks=idle.pinned_blocks))
        if not here.has_room(context, chunk):
            return False
        if name not in self._fleet:
            self._fleet.add(here)
        work.waiting.popleft()
        work.running += 1
        work.held -= len(response.output)
        self._begin(name, trainer, response, chunk)
        return True

    def _begin(self, name: str, trainer: str, response: _Response, chunk: int) -> None:
        self._number += 1
        prompt, request_id = response.prompt, ids.request_id(response.group_id, response.index)
        tokens = np.concatenate([prompt.tokens, response.output])
        blocks = self._fleet[name].capacity.blocks_for(len(tokens), chunk)
        self._fleet.reserve(name, blocks, request_id)
        self._running.setdefault(name, {})[request_id] = _Run(trainer, self._number, blocks, response)
        sampling = replace(  # what comes beside tokens changes none
            prompt.sampling, top_logprobs=None, prompt_logprobs=None, routed_experts_from=None, receipt=UNSET
        )
        order = wire.RunChunk(
            request_id=request_id,
            group_id=response.group_id,
            attempt=self._number,
            key=ids.request_key(prompt.seed, prompt.rollout_number, prompt.group, response.index),
            prompt_len=len(prompt.tokens),
            max_new_tokens=chunk,
            sampling=sampling,
            tokens=tokens,
            wait_for_room=self._requests.policy.admission,
            ahead=True,
        )
        self._orders.append((name, order))
