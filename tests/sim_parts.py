"""A small workload for the simulator, and time for a network without the rest of a cluster."""

import heapq
from itertools import count

from seer.sim.workload import Model, Workload

MODEL = Model(
    step=0.02, request=1e-4, kv=1e-8, attend=1e-9, row=1e-5, weights=2e-3, prefill=1e-5, pull=1e-6,
    kv_tokens=2000, max_num_seqs=64,
)  # fmt: skip
LOAD = Workload(
    name="small", instances=3, groups=12, group_size=6, cap=1500, mean=300, prompt=64, model=MODEL
)


class Clock:
    """Runs what is to happen at a time, and what a network asks to be woken for."""

    def __init__(self):
        self.now, self.order, self.events, self.wakes = 0.0, count(), [], {}

    def at(self, time, action):
        heapq.heappush(self.events, (time, next(self.order), action))

    def wake(self, network, link):
        time = self.wakes[link] = link.next_event()
        if time < float("inf"):
            self.at(time, lambda: self.wakes[link] == time and network.settle(link, time))

    def until(self, end):
        while self.events and self.events[0][0] <= end:
            time, _, action = heapq.heappop(self.events)
            assert time >= self.now
            self.now = time
            action()
        self.now = end
