"""Time for a network of the simulator without the rest of a cluster."""

import heapq
from itertools import count


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
