"""How long chunks should be, whether adaptive ones win, and how soon a request should leave its prefix.

The buffer's machine and policies, as they are, on a fleet of `KvModel` engines in virtual time. A step
lasts `base + row * running + kv * context tokens`; a chunk starts after a dispatch, and after its
missing context was pulled from a pool (it waits) or prefilled (the engine does). Blocks of a request
that left an instance stay cached there until others need them. Lengths are two-level log-normal, made
from a seed: every variant sees the same. Prints JSON. `gain`: of total time, against the best fixed
size or the policy in use.

    python bench/scheduling.py chunks --seeds 3
    python bench/scheduling.py placement --seeds 3
    python bench/scheduling.py placement --seeds 1 --workloads fleet
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from seer.common.policy.fleet import Fleet
from seer.common.policy.length import Estimate
from seer.common.policy.placement import BALANCE_SPREAD, Place
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import POLICIES, Policy
from seer.common.types import Capacity
from seer.services.buffer import events as e
from seer.services.buffer.machine import Machine
from seer.services.engine.kv_model import KvModel, Sequence

FIXED = (32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCK = 16
CHUNK = 256
DISPATCH_SECONDS = 0.01
"""From a chunk's end to the first step of the next: two messages and a scheduler pass."""
PULL_TOKENS = 64
"""Fewer missing tokens than this are prefilled: the default of `pool.pull_tokens`, scaled as lengths are."""
STEPS = 8
"""Most steps taken at once while nothing but lengths changes."""


@dataclass(frozen=True)
class Workload:
    """The shape of one of the paper's workloads, lengths and fleet scaled down by 8 or so.

    `room` is an instance's KV as a share of what its requests would hold together; seconds are per
    step, running request, context token, pulled token and prefilled token.
    """

    instances: int
    groups: int
    size: int
    mean: int
    cap: int
    sigma: float
    room: float
    base: float
    row: float
    kv: float
    pull: float
    prefill: float
    prompt: int = 64
    seats: int = 256
    between: float = 0.65
    outliers: float = 0.05

    def lengths(self, seed: int) -> list[list[int]]:
        """Return output tokens by group: log-normal between and within groups, a few 2.5 times longer."""
        rng = random.Random(seed)
        middle = math.log(self.mean) - self.sigma**2 / 2
        groups = []
        for _ in range(self.groups):
            prompt = middle + rng.gauss(0, self.sigma * math.sqrt(self.between))
            own = [rng.gauss(0, self.sigma * math.sqrt(1 - self.between)) for _ in range(self.size)]
            long = [2.5 if rng.random() < self.outliers else 1.0 for _ in own]
            raw = [math.exp(prompt + x) * k for x, k in zip(own, long, strict=True)]
            groups.append([min(self.cap, max(16, round(x))) for x in raw])
        return groups

    @property
    def capacity(self) -> Capacity:
        """What each instance holds: room for the longest at least."""
        tokens = self.room * self.groups * self.size / self.instances * (self.prompt + self.mean)
        longest = self.prompt + self.cap + BLOCK
        return Capacity(
            kv_blocks=round(max(tokens, longest) / BLOCK) + 1,
            block_size=BLOCK,
            max_num_seqs=self.seats,
            max_model_len=longest,
        )


WORKLOADS = {
    "moonlight": Workload(8, 100, 8, 2800, 8192, 0.9, 0.5, 12.7e-3, 272e-6, 120e-9, 1.5e-6, 15e-6),
    "qwen": Workload(4, 75, 16, 950, 5120, 0.9, 0.25, 39e-3, 1e-6, 160e-9, 16e-6, 45e-6),
    "few": Workload(8, 8, 8, 1100, 4096, 0.75, 1.0, 10e-3, 200e-6, 100e-9, 5e-6, 30e-6, prompt=256),
}
WORKLOADS["fleet"] = replace(WORKLOADS["moonlight"], instances=32, groups=400)
"""As many instances and requests as the paper has: minutes, so only if asked for."""


@dataclass
class Engine:
    """An instance. `debt`: seconds of prefill that its next step takes longer; `cached`: tokens by name."""

    name: str
    capacity: Capacity
    debt: float = 0.0
    busy: bool = False
    cached: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.model = KvModel(self.capacity.kv_blocks, BLOCK, self.capacity.max_num_seqs)

    def keep(self, name: str, tokens: int) -> None:
        """Remember what a chunk, or a prompt, left in the cache; the oldest go as blocks are needed."""
        self.cached[name] = max(tokens, self.cached.pop(name, 0))
        while self.cached and sum(self.cached.values()) > self.model.free * BLOCK:
            self.cached.popitem(last=False)


Run = dict[str, float]
Size = Callable[[Machine, RequestView], int]
"""An adaptive policy: the most tokens of a request's next chunk."""


class System:
    """One rollout, from submission to the last response."""

    def __init__(self, load: Workload, seed: int, place: Place, size: Size, pool: bool) -> None:
        self.load, self.pool = load, pool
        policy = replace(POLICIES["divided"], place=place)
        self.machine = Machine(_Sized(policy, self, size), e.Limits(chunk_size=load.cap))
        self.lengths = {
            f"r/{g}#{i}": n for g, group in enumerate(load.lengths(seed)) for i, n in enumerate(group)
        }
        self.engines = {f"e{i}": Engine(f"e{i}", load.capacity) for i in range(load.instances)}
        self.chunks: dict[str, e.Dispatch] = {}
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.now = 0.0
        self.ends: list[float] = []
        self.counts = dict.fromkeys(("chunks", "migrations", "pulled", "prefilled"), 0)

    def run(self) -> Run:
        """Return total and tail time in seconds, and what was moved, in chunks and tokens."""
        for engine in self.engines.values():
            self._send(e.EngineJoined(engine.name, engine.capacity))
        specs = [e.GroupSpec(str(g), self.load.prompt) for g in range(self.load.groups)]
        self._send(e.GroupsSubmitted("t", "r", self.load.size, self.load.cap, specs))
        while self.agenda:
            self.now, _, action = heapq.heappop(self.agenda)
            action()
        assert len(self.ends) == len(self.lengths)
        assert not any(engine.model.preemptions for engine in self.engines.values())
        self.counts["migrations"] = self.machine.counters["migrations"]
        tail = self.now - self.ends[int(0.9 * len(self.ends))]
        return {"total": self.now, "tail": tail, **self.counts}

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (self.now + seconds, next(self.order), action))

    def _send(self, event: e.Event) -> None:
        for item in self.machine.handle(event, self.now):
            if isinstance(item, e.Dispatch):
                self._dispatch(item)

    def _dispatch(self, chunk: e.Dispatch) -> None:
        engine, view = self.engines[chunk.instance], self.machine.requests[chunk.request_id].view
        group = chunk.request_id.partition("#")[0]
        missing = view.context - max(engine.cached.pop(view.request_id, 0), engine.cached.get(group, 0))
        engine.keep(group, view.prompt_len)
        delay = DISPATCH_SECONDS
        if self.pool and view.generated and missing > PULL_TOKENS:
            delay += missing * self.load.pull
            self.counts["pulled"] += missing
        else:
            engine.debt += missing * self.load.prefill
            self.counts["prefilled"] += missing
        self.counts["chunks"] += 1
        self.chunks[chunk.request_id] = chunk
        end = min(view.generated + chunk.max_new_tokens, self.lengths[chunk.request_id])
        sequence = Sequence(chunk.request_id, view.context, view.prompt_len + end)
        self._at(delay, lambda: self._add(engine, sequence))

    def _add(self, engine: Engine, sequence: Sequence) -> None:
        engine.model.add(sequence)
        if not engine.busy:
            engine.busy = True
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        if not (engine.model.waiting or engine.model.running):
            engine.busy = False
            return
        step = engine.model.step(STEPS)
        tokens = sum(sequence.length for sequence in step.ran)
        one = self.load.base + self.load.row * len(step.ran) + self.load.kv * tokens
        debt, engine.debt = engine.debt, 0.0
        self._at(step.steps * one + debt, lambda: self._stepped(engine, step.ended))

    def _stepped(self, engine: Engine, ended: list[Sequence]) -> None:
        for sequence in ended:
            chunk = self.chunks.pop(sequence.name)
            view = self.machine.requests[sequence.name].view
            generated = sequence.length - view.prompt_len
            done = generated == self.lengths[sequence.name]
            if done:
                self.ends.append(self.now)
                group = sequence.name.partition("#")[0]
                known = self.machine.estimates[group]
                longest = max(generated, known.tokens if known.tokens < self.load.cap else 0)
                self._send(e.EstimatesChanged({group: Estimate(float(longest))}))
            else:
                engine.keep(sequence.name, sequence.length)
            count = generated - view.generated
            finish = "stop" if done else ""
            self._send(e.ChunkEnded(engine.name, sequence.name, chunk.attempt, count, finish))
        self._step(engine)


class _Sized:
    """The policy, with chunks of another size."""

    def __init__(self, policy: Policy, system: System, size: Size) -> None:
        self.order, self.place, self.admission = policy.order, policy.place, policy.admission
        self._sized = lambda view: size(system.machine, view)

    def chunk(self, request: RequestView, chunk_size: int) -> int:
        return max(1, min(self._sized(request), request.remaining, chunk_size))


def fixed(tokens: int) -> Size:
    return lambda _machine, _view: tokens


def idle(low: int, high: int) -> Size:
    """Short chunks while others wait for room, long ones once nobody does."""
    return lambda machine, _view: low if len(machine.queue) > 1 else high


def remaining(share: float, low: int, high: int) -> Size:
    """Return a share of what the group's estimate says is left."""

    def size(machine: Machine, view: RequestView) -> int:
        left = machine.estimates[view.request_id.partition("#")[0]].tokens - view.generated
        return round(min(high, max(low, share * left)))

    return size


def grown(low: int, high: int) -> Size:
    """As much again as there is: few boundaries for long responses."""
    return lambda _machine, view: min(high, max(low, view.generated))


ADAPTIVE = {
    "idle 64/1024": idle(64, 1024),
    "idle 128/1024": idle(128, 1024),
    "idle 256/2048": idle(256, 2048),
    "remaining/4": remaining(0.25, 64, 1024),
    "remaining/8": remaining(0.125, 64, 1024),
    "grown 64-1024": grown(64, 1024),
}


def near(spread: int, siblings: bool = False) -> Place:
    """Stay within `spread` chunks of the least loaded; `siblings`: begin where one of the group began."""
    began: dict[int, str] = {}

    def place(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
        emptiest = fleet.emptiest(request.context, chunk)
        if emptiest is None:
            return None
        home = request.last_instance or (began.get(request.group_number, "") if siblings else "")
        room = fleet.has_room(home, request.context, chunk)
        name = home if room and fleet[home].chunks - emptiest.chunks <= spread else emptiest.name
        began[request.group_number] = name
        return name

    return place


PLACES = {f"spread {spread}": (spread, False) for spread in (0, 1, 2, 4, 8, 32)} | {
    f"spread {spread}, siblings together": (spread, True) for spread in (2, 32)
}


def table(runs: dict[str, list[Run]], against: str) -> dict[str, dict[str, float]]:
    rows = {}
    for label, each in runs.items():
        gain = statistics.mean(a["total"] / b["total"] for a, b in zip(runs[against], each, strict=True)) - 1
        means = {key: round(statistics.mean(run[key] for run in each), 1) for key in each[0]}
        rows[label] = means | {"gain": round(gain, 4)}
    return rows


def chunks(load: Workload, seeds: int, pool: bool) -> dict[str, Any]:
    place = POLICIES["divided"].place
    sizes = {str(tokens): fixed(tokens) for tokens in FIXED} | ADAPTIVE
    runs = {
        label: [System(load, seed, place, size, pool).run() for seed in range(seeds)]
        for label, size in sizes.items()
    }
    best = min(map(str, FIXED), key=lambda label: sum(run["total"] for run in runs[label]))
    return {"best_fixed": int(best), "sizes": table(runs, best)}


def placement(load: Workload, seeds: int, pool: bool) -> dict[str, Any]:
    runs = {
        label: [System(load, seed, near(*how), fixed(CHUNK), pool).run() for seed in range(seeds)]
        for label, how in PLACES.items()
    }
    return {"chunk_size": CHUNK, "places": table(runs, f"spread {BALANCE_SPREAD}")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("chunks", "placement"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["moonlight", "qwen", "few"])
    options = parser.parse_args()
    started = time.perf_counter()
    study = chunks if options.what == "chunks" else placement
    runs = [
        {"workload": name, "pool": pool, **study(WORKLOADS[name], options.seeds, pool)}
        for name in options.workloads
        for pool in (True, False)
    ]
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"seeds": options.seeds, "seconds": seconds, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
