"""Ranks of a trainer without torch.distributed: threads of one process, or clients of one event loop."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from seer.client import sharded_update


class MadeUpRanks:
    """See `Ranks`; `all_of` makes those that belong together."""

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

    @property
    def outcome(self):
        """The future that `tell` of the first rank settles, in `in_one_loop`."""
        return self._shared.setdefault("outcome", asyncio.get_running_loop().create_future())


def on_each(ranks, work):
    """Return what `work(rank)` returns on each rank, at once; or what it raises."""

    def tried(rank):
        try:
            return work(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(tried, ranks))


def in_one_loop(monkeypatch):
    """Have ranks hear of the outcome of an update without threads, as virtual time needs."""

    def told(call, *outcome):
        future = call.__self__.outcome
        if outcome and not future.done():
            future.set_result(outcome[0])
        return asyncio.ensure_future(asyncio.shield(future))

    MadeUpRanks.tell = lambda ranks: None  # only its name is needed
    monkeypatch.setattr(sharded_update, "_on_a_thread", told)
