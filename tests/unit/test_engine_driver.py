"""The engine's thread driver, in real time."""

import asyncio
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from virtual_time import eventually, virtual

from seer.common.clock import LoopClock
from seer.common.errors import EngineBroken, EngineError, InvalidField
from seer.common.sleep import SleepState
from seer.common.types import Capacity, InstanceStats, SamplingParams
from seer.services.engine import driver as driver_module
from seer.services.engine import step_watch
from seer.services.engine.backend import Chunk, ChunkEnd, Generated, StepOutput
from seer.services.engine.driver import InlineDriver, ThreadDriver


class Counting:
    """A backend that counts up one token a step, and notes which thread calls it."""

    capacity = Capacity(kv_blocks=10, block_size=4, max_num_seqs=2, max_model_len=39)
    versions = {"backend": "counting"}

    def __init__(self, fail=None, gate=None):
        self.fail, self.gate = fail, gate
        self.threads, self.chunks, self.steps, self.idle_asked, self.closed = set(), {}, 0, 0, 0
        self.digests = []

    def start(self):
        self.threads.add(threading.get_ident())
        if self.fail == "start":
            raise EngineError("no such model")
        if self.gate:
            self.gate.wait(5)

    def add(self, chunk):
        self.threads.add(threading.get_ident())
        if chunk.max_new_tokens == 101:
            raise InvalidField("max_new_tokens", chunk.max_new_tokens, "not 101")
        self.chunks[chunk.request_id] = [chunk, 0]

    def drop(self, request_id, attempt):
        self.threads.add(threading.get_ident())
        self.chunks.pop(request_id, None)

    def bind_weights(self, digest):
        self.threads.add(threading.get_ident())
        if self.fail == "bind":
            raise RuntimeError("no rank answers")
        self.digests.append(digest)

    def has_work(self):
        self.idle_asked += not self.chunks
        return bool(self.chunks)

    def step(self):
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.fail == self.steps:
            raise RuntimeError("device lost")
        out = StepOutput()
        for request_id, entry in list(self.chunks.items()):
            chunk, count = entry
            entry[1] += 1
            news = Generated(request_id=request_id, attempt=chunk.attempt, token_ids=[count], logprobs=[-1.0])
            out.generated.append(news)
            if entry[1] == chunk.max_new_tokens:
                out.ended.append(ChunkEnd(request_id=request_id, attempt=chunk.attempt, finish=""))
                del self.chunks[request_id]
        return out

    def stats(self):
        self.threads.add(threading.get_ident())
        return InstanceStats(steps=self.steps, running=len(self.chunks))

    def close(self):
        self.closed += 1


class Sink:
    def __init__(self):
        self.tokens, self.ended, self.errors, self.threads = {}, [], [], set()

    def output(self, out):
        self.threads.add(threading.get_ident())
        for news in out.generated:
            self.tokens.setdefault(news.request_id, []).extend(news.token_ids)
        self.ended += [end.request_id for end in out.ended]

    def rejected(self, chunk, error):
        self.threads.add(threading.get_ident())
        self.errors.append((chunk.request_id, error))


def chunk(request_id, new):
    return Chunk(
        request_id=request_id, group_id="g", attempt=1, key=1, prompt_len=1, max_new_tokens=new,
        sampling=SamplingParams(), tokens=[1],
    )  # fmt: skip


@asynccontextmanager
async def thread_driver(backend):
    sink = Sink()
    driver = ThreadDriver(backend, sink)
    facts = await driver.start(5.0)
    assert (facts.capacity, facts.versions) == (Counting.capacity, Counting.versions)
    running = asyncio.create_task(driver.run())
    yield driver, sink, running
    running.cancel()
    await asyncio.wait([running])
    await driver.close()
    assert backend.closed == 1


async def test_thread_driver_keeps_the_backend_on_one_thread_and_the_sink_on_the_loop():
    backend = Counting()
    async with thread_driver(backend) as (driver, sink, _):
        await driver.bind_weights("abc")
        assert backend.digests == ["abc"]
        driver.add(chunk("a", 50))
        driver.add(chunk("b", 70))
        driver.add(chunk("c", 101))
        await eventually(lambda: len(sink.ended) == 2 and bool(sink.errors))
        assert sink.tokens == {"a": list(range(50)), "b": list(range(70))}
        assert [(name, type(error)) for name, error in sink.errors] == [("c", InvalidField)]
        await eventually(lambda: driver.stats.steps == backend.steps)
    assert sink.threads == {threading.get_ident()}
    assert len(backend.threads) == 1
    assert threading.get_ident() not in backend.threads


async def test_thread_driver_does_not_spin_while_idle():
    backend = Counting()
    async with thread_driver(backend) as (driver, sink, _):
        driver.add(chunk("a", 3))
        await eventually(lambda: sink.ended == ["a"])
        asked = backend.idle_asked
        await asyncio.sleep(0.2)
        assert backend.idle_asked - asked <= 3
        assert backend.steps == 3


async def test_thread_driver_drops_chunks():
    backend = Counting()
    async with thread_driver(backend) as (driver, sink, _):
        driver.add(chunk("a", 100))
        driver.drop("a", 1)
        driver.add(chunk("b", 1))
        await eventually(lambda: "b" in sink.ended)
        assert "a" not in sink.ended
        driver.add(chunk("c", 10**9))
        await eventually(lambda: driver.stats.running == 1)
        driver.drop("c", 1)
        await eventually(lambda: driver.stats.running == 0)  # though no step follows


async def test_thread_driver_raises_what_the_backend_raised():
    backend = Counting(fail=2)
    async with thread_driver(backend) as (driver, _, running):
        driver.add(chunk("a", 9))
        with pytest.raises(EngineError, match="RuntimeError: device lost"):
            await running


class Hanging(Counting):
    """Receives until `gate` opens, as in a collective that nobody ends."""

    def receive_weights(self, folder, engine, digest):
        self.gate.wait(30)


async def test_thread_driver_ends_the_process_if_weights_in_place_do_not_arrive(monkeypatch):
    ends = []
    monkeypatch.setattr(driver_module, "end_process", lambda: ends.append(1))
    gate = threading.Event()
    gate.set()
    driver = ThreadDriver(Hanging(gate=gate), Sink())
    await driver.start(5.0)
    await driver.receive_weights("/plan", "e0", "d", 5.0)
    gate.clear()
    with pytest.raises(EngineBroken, match=r"engine\.in_place_seconds = 0\.05: this engine ends"):
        await driver.receive_weights("/plan", "e0", "d", 0.05)
    gate.set()
    await driver.close()
    assert ends == [1]


class Stuck(Counting):
    """Steps, and reads weights, only while `gate` is open."""

    def step(self):
        self.gate.wait(30)
        return super().step()

    def load_weights(self, folder, digest, base=None):
        self.gate.wait(30)


async def test_a_step_that_does_not_end_ends_the_process_and_nothing_else_that_takes_long_does(
    monkeypatch, capfd
):
    ends, limit = [], 0.2
    monkeypatch.setattr(driver_module, "end_process", lambda: ends.append(1))
    monkeypatch.setattr(driver_module, "LOOK_SECONDS", limit / 10)
    monkeypatch.setattr(step_watch, "LOOK_SECONDS", limit / 10)
    monkeypatch.setattr(step_watch, "STEP_SECONDS", limit)
    gate = threading.Event()
    gate.set()
    driver = ThreadDriver(Stuck(gate=gate), Sink())
    await driver.start(5.0)
    running = asyncio.create_task(driver.run())
    await asyncio.sleep(3 * limit)  # idle
    gate.clear()
    loading = asyncio.create_task(driver.load_weights("/w", "abc"))
    await asyncio.sleep(3 * limit)
    assert not running.done()
    gate.set()
    await loading
    gate.clear()
    driver.add(chunk("a", 3))
    with pytest.raises(EngineBroken, match="a step did not end"):
        await running
    assert "in step" in capfd.readouterr().err  # where the thread stands
    gate.set()
    await driver.close()
    assert ends == [1]


def test_a_process_that_hangs_ends_with_its_workers_whatever_these_do():
    code = (
        "import multiprocessing, os, signal, threading, time\n"
        "from seer.services.engine.driver import end_process\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))\n"
        "    worker.start()\n"
        "    os.kill(worker.pid, signal.SIGSTOP)\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    print(worker.pid, flush=True)\n"
        "    end_process()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == driver_module.EXIT_BROKEN
    worker = Path(f"/proc/{int(ended.stdout)}/stat")
    for _ in range(3000):  # it was told to end, which the kernel does in its own time
        try:
            state = worker.read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        time.sleep(0.01)
    pytest.fail(f"the worker is still in state {state}")


class Broken(Counting):
    def receive_weights(self, folder, engine, digest):
        raise RuntimeError("no rank answers")

    def load_weights(self, folder, digest, base=None):
        raise RuntimeError("no rank answers")

    def sleep(self, state, level):
        raise RuntimeError("no rank answers")


@pytest.mark.parametrize(
    "make", [ThreadDriver, lambda backend, sink: InlineDriver(backend, sink, LoopClock())]
)
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("bind_weights", ["abc"]), ("load_weights", ["/w", "abc"]), ("sleep", [SleepState.ASLEEP, 1]),
        ("receive_weights", ["/w", "e0", "abc", 5.0]),
    ],
)  # fmt: skip
async def test_what_a_backend_cannot_do_is_an_engine_error(make, call, arguments):
    driver = make(Broken(fail="bind"), Sink())
    await driver.start(5.0)
    with pytest.raises(EngineError, match="RuntimeError: no rank answers"):
        await getattr(driver, call)(*arguments)
    await driver.close()


async def test_thread_driver_reports_a_failed_start():
    driver = ThreadDriver(Counting(fail="start"), Sink())
    with pytest.raises(EngineError, match="no such model"):
        await driver.start(5.0)
    await driver.close()


async def test_thread_driver_gives_up_loading_at_its_deadline():
    gate = threading.Event()
    backend = Counting(gate=gate)
    driver = ThreadDriver(backend, Sink())
    with pytest.raises(EngineError, match=r"engine\.load_seconds = 0\.05"):
        await driver.start(0.05)
    gate.set()
    await driver.close()
    assert backend.closed == 1


class Gated(Counting):
    """Waits before each step until it is let; `sizes` has the chunks of each step."""

    def __init__(self):
        super().__init__()
        self.let, self.entered, self.sizes = threading.Semaphore(0), 0, []

    def step(self):
        self.entered += 1
        assert self.let.acquire(timeout=10)
        self.sizes.append(len(self.chunks))
        return super().step()


async def test_all_that_came_during_a_step_is_in_the_next():
    backend = Gated()
    async with thread_driver(backend) as (driver, sink, _):
        driver.add(chunk("a", 2))
        await eventually(lambda: backend.entered == 1)
        driver.add(chunk("b", 1))
        driver.add(chunk("c", 1))
        backend.let.release(2)
        await eventually(lambda: len(sink.ended) == 3)
        assert backend.sizes == [1, 3]


async def test_an_answer_that_nobody_waits_for_is_dropped():
    backend, failures = Gated(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    async with thread_driver(backend) as (driver, sink, _):
        driver.add(chunk("a", 1))
        await eventually(lambda: backend.entered == 1)
        asking = asyncio.create_task(driver.bind_weights("abc"))
        await asyncio.sleep(0)
        asking.cancel()
        backend.let.release()
        await eventually(lambda: sink.ended == ["a"] and backend.digests == ["abc"])
        await driver.bind_weights("def")
    assert failures == []


def test_the_thread_ends_with_the_loop():
    backend = Gated()
    driver = ThreadDriver(backend, Sink())

    async def begin():
        await driver.start(5.0)
        driver.add(chunk("a", 50))
        await eventually(lambda: backend.entered == 1)

    asyncio.run(begin())
    backend.let.release(100)
    driver._thread.join(10)
    assert not driver._thread.is_alive()
    assert backend.closed == 1


@virtual
async def test_inline_output_comes_when_its_modelled_time_is_over():
    class Slow(Counting):
        def step(self):
            out = super().step()
            out.seconds = 5.0
            return out

    sink = Sink()
    driver = InlineDriver(Slow(), sink, LoopClock())
    await driver.start(5.0)
    running = asyncio.create_task(driver.run())
    driver.add(chunk("a", 2))
    await asyncio.sleep(9)
    assert sink.tokens == {"a": [0]}
    await asyncio.sleep(2)
    assert sink.ended == ["a"]
    running.cancel()
