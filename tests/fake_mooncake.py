"""A `MooncakeDistributedStore` that does what a test wants, on real addresses."""

import ctypes
import re
import threading

import torch
from living import wait_for

from seer.services.engine.vllm.kv_pool.block_copies import KvRegions
from seer.services.engine.vllm.kv_pool.guarded_store import GuardedStore, StoreSettings

PATIENCE_SECONDS = 30.0
"""Bound on what a test waits for; nothing that works takes nearly as long."""


def flip(key, value):
    at = 16 + len(value) // 2
    return len(value), value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


LIES = {
    "flipped bit": flip,
    "flipped checksum": lambda key, value: (len(value), bytes([value[0] ^ 128]) + value[1:]),
    "short": lambda key, value: (len(value) // 2, value[: len(value) // 2]),
    "nothing": lambda key, value: (len(value), b""),
    "zeros": lambda key, value: (len(value), bytes(len(value))),
}
"""Ways in which a get may lie: (key, value) to (code, bytes that arrive)."""


class FakePool:
    """What all clients share, and how it misbehaves.

    `hang[method]` is an event that calls wait for; `fail[method]` a code for every key, or an error to
    raise; `lie(key, value)` returns the code and the bytes that a get yields. `asked` lists the calls.
    """

    def __init__(self):
        self.values, self.asked = {}, []
        self.hang, self.fail, self.lie = {}, {}, lambda key, value: (len(value), value)
        self.connections, self.refuse, self.outside = 0, 0, []

    def connect(self, settings):
        self.connections += 1
        if self.connections <= self.refuse:
            raise RuntimeError("no master")
        return FakeMooncake(self)

    def calls(self, method):
        return [what for name, what in list(self.asked) if name == method]

    def hold(self, method):
        """Let calls hang from now on; return what releases them."""
        self.hang[method] = threading.Event()

        def release():
            self.hang.pop(method).set()

        return release

    def begin(self, method, what):
        """Note a call, hang if told to, and return what it fails with."""
        self.asked.append((method, what))
        if method in self.hang:
            self.hang[method].wait(2 * PATIENCE_SECONDS)
        failure = self.fail.get(method)
        if isinstance(failure, Exception):
            raise failure
        return failure


class FakeMooncake:
    def __init__(self, pool):
        self.pool, self.buffer, self.closed = pool, range(0), False

    def register_buffer(self, address, size):
        self.buffer = range(address, address + size)
        return self.pool.begin("register", size) or 0

    def _in_buffer(self, address, length):
        if address not in self.buffer or address + length - 1 not in self.buffer:
            self.pool.outside.append(address)
            raise MemoryError("not registered")

    def batch_is_exist(self, keys):
        failure = self.pool.begin("exists", keys)
        if isinstance(failure, list):
            return failure
        return [failure or int(key in self.pool.values) for key in keys]

    def batch_put_from(self, keys, addresses, lengths, config):
        failure = self.pool.begin("put", keys)
        if failure:
            return [failure] * len(keys)
        for key, address, length in zip(keys, addresses, lengths, strict=True):
            self._in_buffer(address, length)
            self.pool.values.setdefault(key, ctypes.string_at(address, length))  # as Mooncake does
        return [0] * len(keys)

    def batch_get_into(self, keys, addresses, lengths):
        failure = self.pool.begin("get", keys)
        if isinstance(failure, list):
            return failure
        return [failure or self._get(*each) for each in zip(keys, addresses, lengths, strict=True)]

    def _get(self, key, address, length):
        self._in_buffer(address, length)
        if key not in self.pool.values:
            return -704
        code, value = self.pool.lie(key, self.pool.values[key])
        ctypes.memmove(address, value, len(value))
        return code

    def batch_remove(self, keys, force):
        assert force
        self.pool.begin("remove", keys)
        return [0 if self.pool.values.pop(key, None) is not None else -704 for key in keys]

    def remove_by_regex(self, pattern):
        self.pool.begin("remove_by_regex", pattern)
        gone = [key for key in list(self.pool.values) if re.search(pattern, key)]
        for key in gone:
            del self.pool.values[key]
        return len(gone)

    def close(self):
        self.pool.begin("close", None)
        self.closed = True


class Engine:
    """An engine's KV, in two regions of `BLOCKS` blocks, and its store: eight slots of staging memory."""

    BLOCKS = 24
    STARTS = {9_000_000: 3 * 2**14, 10_000: 5 * 2**14}
    """Bytes of a block in each region, by an address that is nowhere."""

    def __init__(self, pool, namespace="ns", call_seconds=PATIENCE_SECONDS, staging_mib=1, attach=True):
        settings = StoreSettings(
            master="m:1", host="h", protocol="tcp", device="", lease_seconds=5.0,
            call_seconds=call_seconds, staging_mib=staging_mib,
        )  # fmt: skip
        self.kv = {
            start: torch.zeros((self.BLOCKS, size), dtype=torch.uint8) for start, size in self.STARTS.items()
        }
        self.store = GuardedStore(settings, pool.connect)
        self.store.use_namespace(namespace)
        if attach:
            self.store.attach(KvRegions(self.kv.items()), sum(self.STARTS.values()))
            wait_for(lambda: self.calls.connected or pool.refuse)

    @property
    def calls(self):
        return self.store._calls

    @property
    def free_slots(self):
        return len(self.store._staging._free)

    def never_pause(self):
        """Leave the breaker aside."""
        self.calls._breaker.until = self.calls._breaker.pause = 0.0

    def settle(self):
        """Wait until the pool has all that was put."""
        self.calls._writes.submit(lambda: None).result(PATIENCE_SECONDS)

    def fill(self, block, value):
        for i, memory in enumerate(self.kv.values()):
            generator = torch.Generator().manual_seed(2 * value + i)
            memory[block] = torch.randint(0, 256, (memory.shape[1],), generator=generator, dtype=torch.uint8)

    def bytes_of(self, block):
        return b"".join(memory[block].numpy().tobytes() for memory in self.kv.values())

    def whole(self):
        return [memory.clone() for memory in self.kv.values()]

    def addresses(self, blocks):
        return [[start + block * size for start, size in self.STARTS.items()] for block in blocks]

    def put(self, keys, blocks):
        return self.store.batch_put_from_multi_buffers(keys, self.addresses(blocks), None, None)

    def get(self, keys, blocks):
        return self.store.batch_get_into_multi_buffers(keys, self.addresses(blocks), None)

    def has(self, keys):
        return self.store.batch_is_exist(keys)

    def counts(self):
        return {"saved_blocks": 0, "dropped_blocks": 0, "failures": 0, "corrupt": 0} | self.store.counts()
