"""A device's streams without a device: what they are given is done late, in order, and checked."""

import threading
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

MOVES = {"copy_", "index_copy_", "index_select"}
"""What copies may do: all write into memory that is there. Anything else could allocate."""

VIEWS = {"slice", "select", "view", "detach", "alias"}


class LateStream:
    """A `Stream` whose work is done when somebody waits for it; `done` lists what it did.

    Work that reads memory sees what is there when it is done, as on a device. `model` is what the model's own
    stream still has to do: calls, done when they are waited for.
    """

    def __init__(self, device=None):
        self.queue, self.done, self.threads, self.model = [], [], set(), []

    @contextmanager
    def current(self):
        self.threads.add(threading.get_ident())
        with _Late(self.queue):
            yield

    def mark(self):
        return list(self.model)  # what it has now, and nothing later

    def wait_for(self, event):
        self.queue += [("wait", call) for call in event]

    def synchronize(self):
        queue, self.queue[:] = list(self.queue), []
        with _disable_current_modes():
            for name, call in queue:
                call()
                self.done.append(name)


class _Late(TorchDispatchMode):
    def __init__(self, queue):
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in VIEWS:
            return function(*args, **kwargs)
        assert name in MOVES, f"{name} on a device's stream"
        assert name != "copy_" or kwargs.get("non_blocking") or args[2:] == (True,), "a copy that waits"
        self._queue.append((name, lambda: function(*args, **kwargs)))
        return kwargs.get("out", args[0])
