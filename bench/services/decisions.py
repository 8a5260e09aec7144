"""How long the buffer's machine takes to decide, with up to 100,000 requests on 1,024 full instances.

Timed is `RequestMachine.apply(event)`, all of it: a chunk's end frees its room, queues its request again or
finishes it, and dispatches whoever goes next. That may be many, where one waited for much room: a
`decision` is the event's time over the chunks that it dispatched (at least 1). Changed estimates of
one group sort its 16 requests anew. One chunk in `CHUNKS` is its request's last; instances are full at
all times. With Python's garbage collector as it is by default, and with what lives frozen out of it.
Prints JSON, in microseconds of processor time: what else runs on the machine is left out.

    python bench/services/decisions.py
    python bench/services/decisions.py --policies seer --events 5000
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from typing import Any

from lib.hardware import machine

from seer.common import wire
from seer.common.policy.length import Estimate
from seer.common.policy.schedule import POLICIES
from seer.common.types import Capacity
from seer.services.buffer.events import FromTrainer, Joined
from seer.services.buffer.requests import events, instructions, state
from seer.services.buffer.requests.request_machine import RequestMachine

GROUP = 16
CHUNK = 2048
CAP = 65_536
CHUNKS = 11
"""Chunks of a response: 22,386 tokens on average in the paper's Moonlight workload."""
CAPACITY = Capacity(kv_blocks=31_250, block_size=16, max_num_seqs=128, max_model_len=CAP + 512)
REGISTER = wire.Register(capacity=CAPACITY, weight_version=0)
"""500,000 tokens of KV: about 50 requests at a time, half of all."""
WARM_UP = 4
"""Events before the first timed one, for each running chunk."""
SIZES = ((10_000, 102), (100_000, 1024))
"""Requests of unfinished groups, of which some are finished, and instances."""


class Fleet:
    """A machine with all its instances full, and a random stream of events.

    A group that is over is submitted again, so that the number of requests stays.
    """

    def __init__(self, policy: str, requests: int, instances: int) -> None:
        self.rng = random.Random(0)
        self.spread = 0.0 if POLICIES[policy].estimator == "longest" else 0.6
        self.machine = RequestMachine(POLICIES[policy], state.Limits(chunk_size=CHUNK))
        self.running: list[instructions.Dispatch] = []
        for number in range(instances):
            self.told(Joined(f"engine-{number}", REGISTER))
        self.prompts = [str(number) for number in range(requests // GROUP)]
        self.submit(self.prompts)
        for _ in range(WARM_UP * len(self.running)):  # until requests are at all stages
            self.told(self.end())

    def submit(self, prompts: list[str]) -> None:
        """Submit groups, and say something of them."""
        specs = [events.GroupSpec(prompt, 512) for prompt in prompts]
        self.told(events.GroupsSubmitted("trainer", "rollout", GROUP, CAP, specs))
        for prompt in prompts:
            self.told(self.news(prompt))

    def told(self, event: events.Event) -> tuple[float, int]:
        """Return the seconds of processor time that the machine took, and the chunks that it dispatched."""
        running = len(self.running)
        start = time.thread_time()
        answered = self.machine.apply(event, 0.0)
        seconds = time.thread_time() - start
        over = []
        for item in answered:
            if isinstance(item, instructions.Dispatch):
                self.running.append(item)
            elif isinstance(item, instructions.Deliver):
                over.append(item.group_id.partition("/")[2])
        dispatched = len(self.running) - running
        if over:
            self.told(FromTrainer("trainer", wire.Acknowledge(rollout_id="rollout", prompt_ids=over)))
            self.submit(over)
        return seconds, dispatched

    def end(self) -> events.ChunkEnded:
        """End some running chunk; few are the last of theirs."""
        position = self.rng.randrange(len(self.running))
        self.running[position], self.running[-1] = self.running[-1], self.running[position]
        chunk = self.running.pop()
        finish = "stop" if self.rng.random() < 1 / CHUNKS else ""
        if self.machine.requests[chunk.request_id].view.remaining <= chunk.max_new_tokens:
            finish = "length"
        result = wire.ChunkResult(chunk.request_id, chunk.attempt, chunk.max_new_tokens, finish, "", 0)
        return events.ChunkEnded(chunk.instance, result)

    def news(self, prompt: str) -> events.EstimatesChanged:
        """Say something else of a group."""
        tokens = min(self.rng.lognormvariate(9.7, 0.7), float(CAP))
        return events.EstimatesChanged({f"rollout/{prompt}": Estimate(tokens, self.spread)})


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return p50, p99 and the longest, in microseconds."""
    ordered = sorted(seconds)
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(1e6 * ordered[int(q * (len(ordered) - 1))], 1) for name, q in places.items()}


def measured(fleet: Fleet, events: int) -> dict[str, Any]:
    """Return the times of so many chunks' ends, and of as many groups' news."""
    ends, news = [], []
    for _ in range(events):
        ends.append(fleet.told(fleet.end()))
        if fleet.machine.policy.name != "divided":  # it asks for no estimates
            news.append(fleet.told(fleet.news(fleet.rng.choice(fleet.prompts)))[0])
    figures = {
        "decision": quantiles([seconds / max(1, dispatched) for seconds, dispatched in ends]),
        "chunk_ended": quantiles([seconds for seconds, _ in ends]),
    }
    return figures | ({"estimates_changed": quantiles(news)} if news else {})


def one(policy: str, requests: int, instances: int, events: int) -> dict[str, Any]:
    """Return one policy's figures at one size."""
    fleet = Fleet(policy, requests, instances)
    running, waiting = len(fleet.running), fleet.machine.waiting
    figures: dict[str, Any] = {"policy": policy, "requests": requests, "instances": instances}
    figures |= {"running": running, "waiting": waiting, "by_default": measured(fleet, events)}
    gc.collect()
    gc.freeze()
    figures["frozen"] = measured(fleet, events)
    gc.unfreeze()
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--policies", nargs="+", choices=sorted(POLICIES), default=["divided", "seer-paper", "seer"]
    )
    parser.add_argument("--events", type=int, default=20_000)
    arguments = parser.parse_args()
    rows = []
    for policy in arguments.policies:
        small, large = (one(policy, *size, arguments.events) for size in SIZES)
        p50 = [row["frozen"]["decision"]["p50"] for row in (small, large)]
        rows += [small, large | {"growth_p50": round(p50[1] / p50[0], 2)}]
    json.dump({"machine": machine(), "events": arguments.events, "runs": rows}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
