"""Ranks of a trainer without torch.distributed: threads of one process, or clients of one event loop."""

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from seer.client import sharded_update


class MadeUpRanks:
    """See `Ranks`; `all_of` makes those that belong together."""

    turn = contextlib.nullcontext()

    def __init__(self, rank, shared):
        self.rank, self.size, self._shared = rank, shared["size"], shared

    @staticmethod
    def all_of(size):
        shared = {"size": size, "given": [None] * size, "barrier": threading.Barrier(size, timeout=10)}
        return [MadeUpRanks(rank, shared) for rank in range(size)]

    def gather(self, own):
        shared = self._shared
        shared["given"][self.rank] = own
        shared["barrier"].wait()
        found = list(shared["given"])
        shared["barrier"].wait()
        return found

    def tell(self, outcome=None):
        return self.gather(outcome)[0]


def on_each(ranks, work):
    """Return what `work(rank)` returns on each rank, at once; or what it raises."""

    def tried(rank):
        try:
            return work(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(tried, ranks))


class _Outcomes(queue.SimpleQueue):
    """Of the first rank: once it has an outcome, all ranks go on to hear that."""

    def __init__(self):
        super().__init__()
        self.go_on = lambda: None

    def put(self, outcome):
        super().put(outcome)
        self.go_on()


class _Calls:
    """The collective calls of one update of all ranks, in step: in threads, while the loop stands still."""

    def __init__(self, size):
        self.size, self.ranks, self.planned, self.outcomes = size, [], False, None

    def add(self, calls, heard):
        update = calls.gi_frame.f_locals["self"]
        self.ranks.append((calls, heard))
        if update._rank == 0:
            self.outcomes, update._outcomes.go_on = update._outcomes, self.tell
        if len(self.ranks) == self.size:
            self.planned = True
            self.step()
            if not self.outcomes.empty():
                self.tell()

    def tell(self):
        if self.planned and self.ranks:
            self.step()

    def step(self):
        found = on_each(self.ranks, lambda rank: next(rank[0]))
        for (_, heard), each in zip(self.ranks, found, strict=True):
            heard.put_nowait(each)
        told = [each for each in found if isinstance(each, sharded_update._Told)]
        if any(isinstance(each, Exception) for each in found) or (told and not told[0].again()):
            self.ranks = []


def in_one_loop(monkeypatch):
    """Have ranks of one loop make their collective calls while it stands still, as virtual time needs."""

    def begun(calls, heard):
        shared = calls.gi_frame.f_locals["self"]._source.ranks._shared
        if not (now := shared.get("calls")) or len(now.ranks) == now.size or (now.planned and not now.ranks):
            now = shared["calls"] = _Calls(shared["size"])
        now.add(calls, heard)

    monkeypatch.setattr(sharded_update, "queue", SimpleNamespace(SimpleQueue=_Outcomes))
    monkeypatch.setattr(sharded_update, "_on_a_thread", begun)
