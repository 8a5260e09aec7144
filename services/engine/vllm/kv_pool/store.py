"""A Mooncake store that may be full, slow, away or wrong: to vLLM's connector it only ever misses.

`GuardedStore` stands where the connector expects a `MooncakeDistributedStore`.

Invariants:
- a call that somebody waits for returns, whatever Mooncake does: what failed, or took longer than
  `call_seconds` (each quarter of the staging memory, where more is moved), is a miss, and counted;
- while the pool is away (see `calls`) nothing is asked of it;
- keys begin with a namespace: KV of other weights, types or layouts cannot be found; without one
  nothing is asked or kept;
- a put returns once its blocks are copied: a slow pool holds no KV blocks, and a put that finds no
  room in `Staging` is dropped;
- nothing is removed but keys and namespaces of our own;
- a pool that takes nothing for long is said, and when it does again: nothing is dropped in silence.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from seer.common.errors import EngineError
from seer.common.process.log import get_logger
from seer.services.engine.vllm.kv_pool.calls import Away, Calls
from seer.services.engine.vllm.kv_pool.saves import Saves
from seer.services.engine.vllm.kv_pool.staging import Regions, Staging

MISSING, NO_ROOM = -704, -200
"""Mooncake's codes for a key that is not there, and for a full store."""

FULL_SECONDS = 0.2
"""A full store is spared further puts for so long: it evicts meanwhile."""

_log = get_logger()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of `config.PoolConfig`, with `host` filled in."""

    master: str
    host: str
    protocol: str
    device: str
    lease_seconds: float
    call_seconds: float
    staging_mib: int


class GuardedStore:
    """One rank's store. `connect` returns a ready `MooncakeDistributedStore`, or raises.

    `key_prefix` is what this rank's keys have before a block's hash.
    """

    def __init__(self, settings: Settings, connect: Callable[[Settings], Any]) -> None:
        self.key_prefix = ""
        self._settings = settings
        self._connect = connect
        self._namespace = ""
        self._staging: Staging | None = None
        self._calls = Calls(settings.call_seconds, self._connected)
        self._full_until = 0.0
        self._saves, self._saving = Saves(), threading.Lock()

    # --- for the engine ------------------------------------------------------------------

    def attach(self, regions: Regions, block_bytes: int) -> None:
        """Say where KV lies, and how many bytes of it a block has on this rank; begin to connect.

        Raises `EngineError` when the staging memory holds too few blocks.
        """
        room = self._settings.staging_mib * 2**20
        if room < 4 * block_bytes:
            raise EngineError(
                f"pool.staging_mib = {self._settings.staging_mib}: one KV block has "
                f"{block_bytes / 2**20:.1f} MiB; give room for at least four"
            )
        self._regions = regions
        self._staging = Staging(room // block_bytes, block_bytes)
        self._calls.tell(lambda store: None)

    def use(self, namespace: str) -> None:
        """Go by this namespace from now on; the one before is removed once nobody reads it."""
        before, self._namespace = self._namespace, namespace
        if before and before != namespace:
            removal = threading.Timer(self._settings.lease_seconds, self._abandon, [before])
            removal.daemon = True
            removal.start()

    def forget(self, hashes: Sequence[str]) -> None:
        """Remove blocks that nobody will ask for, by their hashes in hexadecimal."""
        if hashes and self._usable:
            keys = [self._key(f"{self.key_prefix}@{digest}") for digest in hashes]
            # Forced: whoever still reads one sees a wrong checksum at worst.
            self._calls.tell(lambda store: store.batch_remove(keys, True))

    def counts(self) -> dict[str, int]:
        """Return totals since the start: `saved_blocks`, `dropped_blocks`, `failures`, `corrupt`; `away`."""
        away = bool(self._namespace) and not (self._calls.connected and self._calls.allowed)
        return {**self._calls.counts(), "away": int(away)}

    # --- what vLLM's connector calls -----------------------------------------------------

    def setup(self, *_: object, **__: object) -> int:
        """Do nothing: our own settings count, and `attach` begins."""
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        """Do nothing: the pool reads and writes our staging memory alone."""
        return 0

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Return 1 for each key that is there, else 0."""
        named = [self._key(key) for key in keys]
        if not self._usable:
            return [0] * len(keys)
        try:
            codes = self._calls.answer(self._calls.ask(lambda store: store.batch_is_exist(named), len(keys)))
        except Away:
            return [0] * len(keys)
        self._calls.note(codes)
        return [int(code == 1) for code in codes]

    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], blocks: Sequence[Sequence[int]], sizes: object, config: object
    ) -> list[int]:
        """Copy blocks, each a list of its parts' addresses, and have them put; 0 or `NO_ROOM` for each."""
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
        """Bring blocks to the addresses of their parts; return their bytes, or a negative code, for each."""
        result: list[int] = []
        for part in _parts(len(keys), self._attached().slots):
            result += self._get([self._key(key) for key in keys[part]], blocks[part])
        return result

    def remove_all(self, force: bool = False) -> int:
        """Refuse: others use this pool too."""
        raise EngineError("a shared pool is never emptied")

    def close(self) -> None:
        """Let go of the pool, after puts under way, within a call's deadline."""
        self._namespace = ""
        self._calls.close()

    # --- behind --------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        return f"{self._namespace}/{key}"

    def _attached(self) -> Staging:
        if self._staging is None:
            raise EngineError("the KV pool is used before KV memory is known")
        return self._staging

    @property
    def _usable(self) -> bool:
        return bool(self._namespace) and self._calls.allowed

    def _abandon(self, namespace: str) -> None:
        """Remove a namespace, unless it is in use again."""
        if namespace != self._namespace:
            self._calls.tell(lambda store: store.remove_by_regex(f"^{re.escape(namespace)}/"))

    def _connected(self) -> Any:  # noqa: ANN401 - Mooncake has no types
        staging = self._attached()
        store = self._connect(self._settings)
        if code := store.register_buffer(staging.address, staging.size):
            raise Away(f"Mooncake cannot register {staging.size} bytes (code {code})")
        _log.info("connected to the KV pool", master=self._settings.master)
        return store

    def _room(self, count: int, leave: int) -> list[int]:
        """Return that many slots. Raises `Away`."""
        if not self._usable:
            raise Away
        seconds = self._calls.seconds
        slots = self._attached().take(count, leave=leave, seconds=seconds)
        if not slots:
            self._calls.failed(f"no room in staging memory for {seconds:g} s")
            raise Away
        return slots

    def _put(self, keys: list[str], blocks: Sequence[Sequence[int]], config: object) -> bool:
        """Copy blocks and have them put; False when the pool is away, full, or too slow for it."""
        staging = self._attached()
        if time.monotonic() < self._full_until:
            return False
        try:
            slots = self._room(len(keys), leave=staging.slots // 2)  # for gets
        except Away:
            return False
        saved = 0

        def put(store: Any) -> None:  # noqa: ANN401 - Mooncake has no types
            nonlocal saved
            lengths = [staging.row_bytes] * len(slots)
            codes = store.batch_put_from(keys, staging.addresses(slots), lengths, config)
            saved = sum(code >= 0 for code in codes)
            if NO_ROOM in codes:
                self._full_until = time.monotonic() + FULL_SECONDS
            self._calls.note(codes, NO_ROOM)

        def done() -> None:
            self._count_saves(saved, len(slots) - saved)
            staging.give_back(slots)

        try:
            staging.fill(slots, keys, self._regions, blocks)
        except BaseException:
            staging.give_back(slots)
            raise
        self._calls.tell(put, after=done)
        return True

    def _count_saves(self, saved: int, dropped: int) -> None:
        self._calls.count("saved_blocks", saved)
        self._calls.count("dropped_blocks", dropped)
        if not self._namespace:  # nobody wants to save
            return
        with self._saving:
            if saved and self._saves.saved():
                _log.info("blocks are saved in the KV pool again")
            if dropped and not saved and self._saves.dropped(time.monotonic()):
                _log.warning("the KV pool takes nothing: all that is saved is dropped", **self.counts())

    def _get(self, keys: list[str], blocks: Sequence[Sequence[int]]) -> list[int]:
        staging = self._attached()
        try:
            slots = self._room(len(keys), leave=0)
        except Away:
            return [MISSING] * len(keys)
        lengths, addresses = [staging.row_bytes] * len(slots), staging.addresses(slots)
        try:
            future = self._calls.ask(lambda store: store.batch_get_into(keys, addresses, lengths), len(keys))
        except Away:
            staging.give_back(slots)
            return [MISSING] * len(keys)
        try:
            codes = self._calls.answer(future)
        except Away:  # the call may still write to them
            future.add_done_callback(lambda _: staging.give_back(slots))
            return [MISSING] * len(keys)
        try:
            return self._take_in(keys, slots, blocks, codes)
        finally:
            staging.give_back(slots)

    def _take_in(
        self, keys: list[str], slots: list[int], blocks: Sequence[Sequence[int]], codes: list[int]
    ) -> list[int]:
        self._calls.note(codes, MISSING)
        came = [i for i, code in enumerate(codes) if code >= 0]
        sound = self._attached().empty(
            [slots[i] for i in came], [keys[i] for i in came], self._regions, [blocks[i] for i in came]
        )
        wrong = [i for i, good in zip(came, sound, strict=True) if not good]
        if wrong:  # whoever asks next must not find them either
            self._calls.count("corrupt", len(wrong))
            self._calls.tell(lambda store: store.batch_remove([keys[i] for i in wrong], True))
        return [MISSING if i in wrong else code for i, code in enumerate(codes)]


def _parts(count: int, slots: int) -> Iterator[slice]:
    """Yield parts that use a quarter of the slots, so that copying and transfer overlap."""
    step = max(1, slots // 4)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
