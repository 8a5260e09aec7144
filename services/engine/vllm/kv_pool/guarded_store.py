"""A Mooncake store that may be full, slow, unreachable or wrong: vLLM's connector only sees misses.

`GuardedStore` takes the place of the connector's `MooncakeDistributedStore`.

Invariants:
- calls return, whatever Mooncake does: a failure, or more than `call_seconds` (for each quarter of the
  staging buffer, where more is moved), is a miss, and counted;
- while the pool is away (see `unreachable_store`) nothing is sent to it;
- keys begin with a namespace, so that KV of other weights, types or layouts cannot be found; without a
  namespace nothing is looked up or saved;
- a put returns once its blocks are copied, so that a slow pool pins no KV blocks; it is dropped if the
  staging buffer has no room;
- only keys and namespaces of our own are removed;
- it is logged once when the pool has taken no block for `PATIENCE_SECONDS`, and once when it does again, but
  not if it is full now and then.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from seer.common.errors import EngineError
from seer.common.process.log import get_logger
from seer.services.engine.vllm.kv_pool.block_copies import KvRegions
from seer.services.engine.vllm.kv_pool.checksummed_buffer import StagingBuffer
from seer.services.engine.vllm.kv_pool.unreachable_store import PoolAway, StoreCalls

MISSING, NO_ROOM = -704, -200
"""Mooncake's codes for a key that is not there, and for a full store."""

FULL_SECONDS = 0.2
"""Pause in puts after the store was full: it evicts meanwhile."""

PATIENCE_SECONDS = 10.0
"""A full pool makes room within a second or two."""

_log = get_logger()


@dataclass(slots=True)
class SaveMonitor:
    """Says when to log that the pool takes no blocks, and that it does again. Time is an argument.

    `since`: when the first block after the last save was dropped, in monotonic seconds.
    """

    since: float | None = None
    reported: bool = False

    def dropped(self, now: float) -> bool:
        """Note a dropped block; return whether to report now that nothing is saved."""
        if self.since is None:
            self.since = now
        if self.reported or now - self.since < PATIENCE_SECONDS:
            return False
        self.reported = True
        return True

    def saved(self) -> bool:
        """Note a saved block; return whether to report that blocks are saved again."""
        reported, self.since, self.reported = self.reported, None, False
        return reported


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `config.PoolConfig`; `host` is never empty."""

    master: str
    host: str
    protocol: str
    device: str
    lease_seconds: float
    call_seconds: float
    staging_mib: int


class GuardedStore:
    """One rank's store. `connect` returns a ready `MooncakeDistributedStore`, or raises.

    `key_prefixes` come before a block's hash in this rank's keys, one for each KV cache group.
    """

    def __init__(self, settings: StoreSettings, connect: Callable[[StoreSettings], Any]) -> None:
        self.key_prefixes: tuple[str, ...] = ()
        self._settings = settings
        self._connect = connect
        self._namespace = ""
        self._staging: StagingBuffer | None = None
        self._calls = StoreCalls(settings.call_seconds, self._open)
        self._full_until = 0.0
        self._saves, self._saving = SaveMonitor(), threading.Lock()

    # --- for the engine ------------------------------------------------------------------

    def attach(self, regions: KvRegions, block_bytes: int) -> None:
        """Take the KV memory and the bytes of a block on this rank; begin to connect.

        Raises `EngineError` when the staging buffer holds fewer than four blocks.
        """
        size = self._settings.staging_mib * 2**20
        if size < 4 * block_bytes:
            raise EngineError(
                f"pool.staging_mib = {self._settings.staging_mib}: one KV block has "
                f"{block_bytes / 2**20:.1f} MiB; give room for at least four"
            )
        self._staging = StagingBuffer(size // block_bytes, block_bytes, regions)
        self._calls.write_later(lambda store: None)

    def loads_ordered(self) -> None:
        """See `DeviceCopies.loads_ordered`; call it before vLLM's connector orders loads."""
        self._attached().copies.loads_ordered()

    def use_namespace(self, namespace: str) -> None:
        """Use this namespace from now on; the one before is removed once no lease on it is left."""
        before, self._namespace = self._namespace, namespace
        if before and before != namespace:
            removal = threading.Timer(self._settings.lease_seconds, self._remove_namespace, [before])
            removal.daemon = True
            removal.start()

    def remove(self, hashes: Sequence[str]) -> None:
        """Remove blocks that nobody needs any more, by their hashes in hexadecimal."""
        if hashes and self._usable:
            keys = [self._key(f"{prefix}@{digest}") for prefix in self.key_prefixes for digest in hashes]
            # Forced: an engine that still reads one sees a wrong checksum at worst.
            self._calls.write_later(lambda store: store.batch_remove(keys, True))

    def counts(self) -> dict[str, int]:
        """Return totals since the start: `saved_blocks`, `dropped_blocks`, `failures`, `corrupt`; `away`."""
        away = bool(self._namespace) and not (self._calls.connected and self._calls.allowed)
        return {**self._calls.counts(), "away": int(away)}

    # --- what vLLM's connector calls -----------------------------------------------------

    def setup(self, *_: object, **__: object) -> int:
        """Do nothing: `attach` connects, by our own settings."""
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        """Do nothing: the pool reads and writes our staging memory alone."""
        return 0

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Return 1 for each key that is in the pool, else 0."""
        named = [self._key(key) for key in keys]
        if not self._usable:
            return [0] * len(keys)
        try:
            codes = self._calls.wait_for(
                self._calls.start_read(lambda store: store.batch_is_exist(named), len(keys))
            )
        except PoolAway:
            return [0] * len(keys)
        self._calls.record(codes)
        return [int(code == 1) for code in codes]

    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], blocks: Sequence[Sequence[int]], sizes: object, config: object
    ) -> list[int]:
        """Copy blocks (lists of their parts' addresses), queue their put; return 0 or `NO_ROOM` for each."""
        done = 0
        for part in _parts(len(keys), self._attached().slots):
            if not self._put([self._key(key) for key in keys[part]], blocks[part], config):
                break
            done = part.stop
        self._count_saves(0, len(keys) - done)
        return [0] * done + [NO_ROOM] * (len(keys) - done)

    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], blocks: Sequence[Sequence[int]], sizes: object
    ) -> list[int]:
        """Load blocks to the addresses of their parts; return their bytes, or a negative code, for each."""
        result: list[int] = []
        for part in _parts(len(keys), self._attached().slots):
            result += self._get([self._key(key) for key in keys[part]], blocks[part])
        return result

    def remove_all(self, force: bool = False) -> int:
        """Refuse: other engines use this pool, too."""
        raise EngineError("a shared pool is never emptied")

    def close(self) -> None:
        """Disconnect after queued puts, within a call's deadline."""
        self._namespace = ""
        self._calls.close()

    # --- internal ------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        return f"{self._namespace}/{key}"

    def _attached(self) -> StagingBuffer:
        if self._staging is None:
            raise EngineError("the KV pool was used before `attach`")
        return self._staging

    @property
    def _usable(self) -> bool:
        return bool(self._namespace) and self._calls.allowed

    def _remove_namespace(self, namespace: str) -> None:
        """Remove a namespace, unless it is in use again."""
        if namespace != self._namespace:
            self._calls.write_later(lambda store: store.remove_by_regex(f"^{re.escape(namespace)}/"))

    def _open(self) -> Any:  # noqa: ANN401 - Mooncake has no types
        staging = self._attached()
        store = self._connect(self._settings)
        if code := store.register_buffer(staging.address, staging.size):
            raise PoolAway(f"Mooncake cannot register {staging.size} bytes (code {code})")
        _log.info("connected to the KV pool", master=self._settings.master)
        return store

    def _acquire_slots(self, count: int, leave: int) -> list[int]:
        """Return that many slots of the staging buffer. Raises `PoolAway`."""
        if not self._usable:
            raise PoolAway
        seconds = self._calls.seconds
        slots = self._attached().acquire(count, leave=leave, seconds=seconds)
        if not slots:
            self._calls.failed(f"the staging buffer had no room for {seconds:g} s")
            raise PoolAway
        return slots

    def _put(self, keys: list[str], blocks: Sequence[Sequence[int]], config: object) -> bool:
        """Copy blocks and queue their put; False when the pool is away, full, or too slow."""
        staging = self._attached()
        if time.monotonic() < self._full_until:
            return False
        try:
            slots = self._acquire_slots(len(keys), leave=staging.slots // 2)  # for gets
        except PoolAway:
            return False
        saved = 0

        def put(store: Any) -> None:  # noqa: ANN401 - Mooncake has no types
            nonlocal saved
            lengths = [staging.row_bytes] * len(slots)
            codes = store.batch_put_from(keys, staging.addresses(slots), lengths, config)
            saved = sum(code >= 0 for code in codes)
            if NO_ROOM in codes:
                self._full_until = time.monotonic() + FULL_SECONDS
            self._calls.record(codes, NO_ROOM)

        def done() -> None:
            self._count_saves(saved, len(slots) - saved)
            staging.release(slots)

        try:
            staging.copy_in(slots, keys, blocks)
        except BaseException:
            staging.release(slots)
            raise
        self._calls.write_later(put, after=done)
        return True

    def _count_saves(self, saved: int, dropped: int) -> None:
        self._calls.count("saved_blocks", saved)
        self._calls.count("dropped_blocks", dropped)
        if not self._namespace:  # nothing is to be saved now
            return
        with self._saving:
            if saved and self._saves.saved():
                _log.info("blocks are saved in the KV pool again")
            if dropped and not saved and self._saves.dropped(time.monotonic()):
                _log.warning("the KV pool takes no blocks: all saves are dropped", **self.counts())

    def _get(self, keys: list[str], blocks: Sequence[Sequence[int]]) -> list[int]:
        staging = self._attached()
        try:
            slots = self._acquire_slots(len(keys), leave=0)
        except PoolAway:
            return [MISSING] * len(keys)
        lengths, addresses = [staging.row_bytes] * len(slots), staging.addresses(slots)
        try:
            future = self._calls.start_read(
                lambda store: store.batch_get_into(keys, addresses, lengths), len(keys)
            )
        except PoolAway:
            staging.release(slots)
            return [MISSING] * len(keys)
        try:
            codes = self._calls.wait_for(future)
        except PoolAway:  # the call may still write to the slots
            future.add_done_callback(lambda _: staging.release(slots))
            return [MISSING] * len(keys)
        try:
            return self._copy_out(keys, slots, blocks, codes)
        finally:
            staging.release(slots)

    def _copy_out(
        self, keys: list[str], slots: list[int], blocks: Sequence[Sequence[int]], codes: list[int]
    ) -> list[int]:
        self._calls.record(codes, MISSING)
        came = [i for i, code in enumerate(codes) if code >= 0]
        valid = self._attached().copy_out(
            [slots[i] for i in came], [keys[i] for i in came], [blocks[i] for i in came]
        )
        wrong = [i for i, good in zip(came, valid, strict=True) if not good]
        if wrong:  # nobody else must find them
            self._calls.count("corrupt", len(wrong))
            self._calls.write_later(lambda store: store.batch_remove([keys[i] for i in wrong], True))
        return [MISSING if i in wrong else code for i, code in enumerate(codes)]


def _parts(count: int, slots: int) -> Iterator[slice]:
    """Yield slices of a quarter of the slots each, so that copying and transfer overlap."""
    step = max(1, slots // 4)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
