"""Ends of rollouts that were tried for the default policy: engines, chunks and drafts of the last responses.

A quarter of each of the paper's workloads: the time over that of the default policy, by held-out seed.
- `even`: once no request waits, whoever ends a chunk goes to an engine that runs fewer, and chunks are a
  quarter as long;
- `apart`: once no request waits, the long responses have three quarters of the engines to themselves;
- `drafts`: the long responses' drafts count `WEIGHT` times;
- `oracle`: longest remaining first all the time; `oracle, drafts`: both.
The long ones, of at least 0.9 of the longest, are taken from the real lengths: no estimate knows more.
Prints JSON.

    python bench/scheduling/ends.py --seeds 2 --only even apart
    python bench/scheduling/ends.py --seeds 2 --drafts --only drafts oracle "oracle, drafts"
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields

from msgspec import structs
from policy_sweep import quarter
from possible import Lengths, named

from seer.common.policy.chunk_size import default_chunk
from seer.common.policy.fleet import Fleet
from seer.common.policy.placement import Place, stay_or_spare_room
from seer.common.policy.request import RequestView
from seer.common.policy.schedule import POLICIES, Policy, oracle
from seer.services.buffer.requests.events import Event
from seer.services.buffer.requests.instructions import Dispatch
from seer.sim import drafting
from seer.sim.cluster import Cluster
from seer.sim.workload import WORKLOADS, Workload

LONG, APART, WEIGHT = 0.9, 0.75, 4.0
WAYS = ("even", "apart", "drafts", "oracle", "oracle, drafts")


def even(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
    """Stay only where no other instance with room runs fewer chunks than are left at home."""
    best = fleet.emptiest(request.context, chunk)
    home = request.last_instance
    stays = fleet.has_room(home, request.context, chunk)
    if stays and (best is None or fleet[home].chunks <= best.chunks):
        return home
    return best.name if best else None


def apart(long: frozenset[str]) -> Place:
    """Keep the long ones and the others on instances of their own, as evenly as `even`."""

    def place(request: RequestView, chunk: int, fleet: Fleet) -> str | None:
        first = max(1, round(APART * len(fleet)))
        own = fleet.names[:first] if request.request_id in long else fleet.names[first:]
        able = [fleet[name] for name in own if fleet.has_room(name, request.context, chunk)]
        if not able:
            return stay_or_spare_room(request, chunk, fleet)
        best = min(able, key=lambda view: (view.chunks, view.name != request.last_instance, view.name))
        return best.name

    return place


class ShortChunks(Policy):
    """Chunks of a quarter."""

    def chunk(self, request: RequestView, chunk_size: int | None) -> int:
        """See `Policy`."""
        return super().chunk(request, (chunk_size or default_chunk(request.max_tokens)) // 4)


class End(Cluster):
    """A rollout that ends in one of `WAYS`."""

    def __init__(self, load: Workload, way: str, lengths: Lengths, drafts: bool) -> None:
        names = named(lengths)
        usual = oracle(names) if "oracle" in way else POLICIES["seer"]
        super().__init__(load, usual, lengths, default_chunk(load.cap), drafts)
        self.usual = self.late = usual
        least = LONG * max(names.values())
        self.long = frozenset(name for name, length in names.items() if length >= least)
        self.favours = "drafts" in way
        values = {field.name: getattr(usual, field.name) for field in fields(Policy)}
        if way == "even":
            self.late = ShortChunks(**values | {"place": even})
        elif way == "apart":
            self.late = Policy(**values | {"place": apart(self.long)})

    def _tell(self, event: Event) -> None:
        self.buffer.scheduler.policy = self.usual if len(self.buffer.scheduler) else self.late
        super()._tell(event)

    def _dispatch(self, item: Dispatch) -> None:
        probe = self.favours and item.request_id in self.long
        super()._dispatch(structs.replace(item, probe=probe))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--drafts", action="store_true")
    options = parser.parse_args()
    drafting._WEIGHTS[len(drafting.SIBLINGS) :] = WEIGHT  # the default policy has no probes
    rows = []
    for name in options.workloads:
        whole = WORKLOADS[name]()
        load = quarter(name, whole.group_size, whole.between)
        for seed in range(options.seeds):
            lengths = load.draw(seed)
            chunk = default_chunk(load.cap)
            seer = Cluster(load, POLICIES["seer"], lengths, chunk, options.drafts).run().total
            over = {
                way: round(End(load, way, lengths, options.drafts).run().total / seer, 4)
                for way in options.only
            }
            rows.append({"workload": name, "seed": seed, "seer_seconds": round(seer)} | over)
            print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({**vars(options), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
