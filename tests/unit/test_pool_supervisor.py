"""The pool's services against stopped processes, on virtual time: a Mooncake modelled as one that pings."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Coroutine

import msgspec
import pytest
from virtual_time import PROCESS, VIRTUAL, eventually

from seer.common.clock import LoopClock
from seer.common.config import Config, PoolConfig
from seer.common.errors import Unreachable
from seer.common.pool_metrics import ANSWER_SECONDS
from seer.services.pool import master as master_module
from seer.services.pool import owner as owner_module
from seer.services.pool.master import PoolMaster
from seer.services.pool.memory_process import READY
from seer.services.pool.owner import MISSING_SECONDS, Folder, PoolOwner
from seer.services.pool.settings import CLIENT_SECONDS, PoolError
from seer.services.pool.supervisor import HEALTHY_SECONDS, LONGEST_SECONDS, supervise

pytestmark = VIRTUAL

STOPS = (5.0, 15.0, 45.0, 90.0)
BACK_SECONDS = 60.0


def process(name: str, work: Coroutine[object, object, object]) -> asyncio.Task[object]:
    """Start work as a process of its own, which the loop can freeze."""
    scope = contextvars.copy_context()
    scope.run(PROCESS.set, name)
    return asyncio.get_running_loop().create_task(work, context=scope)


class Mooncake:
    """A master that drops who does not ping for `CLIENT_SECONDS`, and programs that hold memory and ping.

    A holder that is told that it was dropped is listed again by its second ping.
    """

    def __init__(self) -> None:
        self.pinged: dict[str, float] = {}
        self.holders: list[Program] = []
        self.masters = 0
        process("master", self._watch())

    async def answer(self, *_: object) -> str:
        """Answer as the master does, over HTTP: in its own process."""
        task = process("master", self._list())
        await asyncio.wait([task], timeout=ANSWER_SECONDS)
        if not task.done():
            raise Unreachable("no answer")
        return str(task.result())

    async def _list(self) -> str:
        return ",".join(self.pinged)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = asyncio.get_running_loop().time()
            self.pinged = {name: at for name, at in self.pinged.items() if now - at < CLIENT_SECONDS}

    async def hold(self, name: str) -> None:
        """Ping for ever."""
        while True:
            task = process("master", self._ping(name))
            await asyncio.wait([task], timeout=2.0)
            await asyncio.sleep(1.0)

    async def _ping(self, name: str) -> None:
        self.pinged[name] = asyncio.get_running_loop().time()


class Program:
    """A program as the services see it; `work` is what it does until it is killed."""

    def __init__(self, name: str, work: Coroutine[object, object, object]) -> None:
        self.name = name
        self.task = process(name, work)

    @property
    def ended(self) -> bool:
        return self.task.done()

    async def line(self) -> str:
        return READY + self.name

    async def wait(self) -> str:
        await asyncio.wait([self.task])
        return "was killed by SIGKILL"

    async def kill(self) -> None:
        asyncio.get_running_loop().thaw(self.name) if self.name in frozen() else None
        self.task.cancel()
        await asyncio.wait([self.task])


def frozen() -> dict[str, object]:
    return asyncio.get_running_loop()._frozen


async def stop(names: list[str], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    for name in names:
        loop.freeze(name)
    await asyncio.sleep(seconds)
    for name in names:
        if name in frozen():
            loop.thaw(name)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a modelled master answers are names."""

    def read(text: str) -> object:
        return msgspec.defstruct("Figures", [("owners", list)])(owners=text.split(","))

    monkeypatch.setattr(owner_module, "read_figures", read)


async def owner_of(mooncake: Mooncake, monkeypatch: pytest.MonkeyPatch, **settings: object) -> PoolOwner:
    async def start(command: object, environ: object) -> Program:
        name = f"holder-{len(mooncake.holders)}"
        mooncake.holders.append(Program(name, mooncake.hold(name)))
        return mooncake.holders[-1]

    async def there(self: PoolOwner) -> str:
        await mooncake.answer()
        return "here"

    monkeypatch.setattr(owner_module.Program, "start", start)
    monkeypatch.setattr(owner_module, "ask_master", mooncake.answer)
    monkeypatch.setattr(PoolOwner, "_wait_for_master", there)
    owner = PoolOwner(PoolConfig(dram_gib=0.001, **settings), LoopClock())
    await owner.start()
    return owner


async def serve(service: PoolOwner | PoolMaster, name: str, meanwhile: Callable[[], Coroutine]) -> None:
    """Run a service in a process of its own; it must still run after `meanwhile`."""
    task = process(name, service.run())
    await asyncio.sleep(10.0)
    await meanwhile()
    assert not task.done(), task.exception()
    service.drain()
    await asyncio.wait([task], timeout=10.0)
    task.result()


@pytest.mark.parametrize("seconds", STOPS)
@pytest.mark.parametrize(
    ("names", "same"),
    [
        (["owner"], True),
        (["master"], True),
        (["owner", "master", "holder-0"], True),  # the whole machine
        (["master", "holder-0"], True),
        (["holder-0"], False),
        (["owner", "holder-0"], False),
    ],
)
@pytest.mark.usefixtures("figures")
async def test_whoever_is_stopped_the_memory_is_held_again_afterwards(monkeypatch, names, same, seconds):
    mooncake = Mooncake()
    owner = await owner_of(mooncake, monkeypatch)

    async def meanwhile() -> None:
        await stop(names, seconds)
        await asyncio.sleep(CLIENT_SECONDS)
        await eventually(lambda: mooncake.holders[-1].name in mooncake.pinged, BACK_SECONDS)
        if same or seconds < MISSING_SECONDS:  # nothing was begun anew because somebody was stopped
            assert len(mooncake.holders) == 1
        assert sum(not holder.ended for holder in mooncake.holders) == 1

    await serve(owner, "owner", meanwhile)
    assert all(holder.ended for holder in mooncake.holders)


@pytest.mark.usefixtures("figures")
async def test_memory_whose_holder_ends_or_hangs_is_held_anew_with_an_empty_folder(monkeypatch, tmp_path):
    mooncake = Mooncake()
    owner = await owner_of(mooncake, monkeypatch, ssd_gib=1e-6, ssd_path=str(tmp_path))

    async def meanwhile() -> None:
        (tmp_path / "kv" / "left").write_bytes(b"x")
        await mooncake.holders[0].kill()
        await eventually(lambda: "holder-1" in mooncake.pinged, BACK_SECONDS)
        assert list((tmp_path / "kv").iterdir()) == []
        asyncio.get_running_loop().freeze("holder-1")  # for ever
        await eventually(lambda: "holder-2" in mooncake.pinged, BACK_SECONDS)
        assert [holder.ended for holder in mooncake.holders] == [True, True, False]

    await serve(owner, "owner", meanwhile)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", STOPS)
@pytest.mark.parametrize("names", [["service"], ["service", "master"], ["master"]])
async def test_a_master_that_hangs_is_replaced_and_a_stalled_machine_is_no_silence(
    monkeypatch, names, seconds
):
    mooncake = Mooncake()

    async def start(command: object, environ: object) -> Program:
        mooncake.masters += 1
        return Program("master", asyncio.sleep(1e9))

    async def answers(self: PoolMaster, rpc: object) -> bool:
        return bool(await mooncake.answer()) or True

    monkeypatch.setattr(master_module.Program, "start", start)
    monkeypatch.setattr(master_module, "ask_master", mooncake.answer)
    monkeypatch.setattr(master_module, "listen_address", lambda *_: ("127.0.0.1", 1))
    monkeypatch.setattr(master_module, "master_program", lambda: "master")
    monkeypatch.setattr(PoolMaster, "_answers", answers)
    service = PoolMaster(Config(), LoopClock())
    await service.start()

    async def meanwhile() -> None:
        await stop(names, seconds)
        await asyncio.sleep(BACK_SECONDS)
        assert mooncake.masters == (2 if names == ["master"] and seconds > 10 else 1)
        await mooncake.answer()

    await serve(service, "service", meanwhile)


async def test_what_cannot_be_begun_is_tried_for_ever_ever_more_rarely():
    tried: list[float] = []
    lasted = iter([0.0, 2 * HEALTHY_SECONDS])

    async def begin() -> None:
        tried.append(asyncio.get_running_loop().time())
        if len(tried) not in (10, 11):
            raise PoolError("") if len(tried) % 2 else OSError(28, "No space left on device")

    async def lost() -> str:
        await asyncio.sleep(next(lasted, 0.0))
        return "it ended"

    keeper = asyncio.create_task(supervise("it", begin, lost, LoopClock()))
    await asyncio.sleep(3600.0)
    assert not keeper.done()
    keeper.cancel()
    pauses = [after - before for before, after in itertools.pairwise(tried)]
    assert pauses[:5] == [1.0, 2.0, 4.0, 8.0, LONGEST_SECONDS]
    assert pauses[9] == 2 * HEALTHY_SECONDS + 0.5  # a healthy incarnation is forgiven
    assert len(tried) < 3600 / LONGEST_SECONDS + 20


def test_a_folder_can_be_emptied_while_it_is_held(tmp_path):
    folder = Folder(str(tmp_path), 1)
    (folder.path / "deep").mkdir()
    folder.empty()
    assert list(folder.path.iterdir()) == []
    folder.close()
