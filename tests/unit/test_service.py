"""Processes: readiness, draining, failing. Each test runs a real child process."""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from seer.common.process.service import SAME_SECONDS

DEADLINE = 60.0

_CHILD = """
import asyncio, sys
from seer.common.config import Config, Endpoints, LogConfig
from seer.common.errors import ConfigError, EngineError
from seer.common.process.service import run_process

MODE = sys.argv[1]

class Echo:
    def __init__(self, config, transport, clock):
        self.transport = transport
        self.config = config
        self.drained = asyncio.Event()

    async def start(self):
        assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
        if MODE == "slow close":
            close = self.transport.close

            async def slowly():
                print("closing", flush=True)
                await asyncio.sleep(0.5)
                await close()

            self.transport.close = slowly
        if MODE in ("fails", "slow close"):
            raise EngineError("engine.model = x: not a model folder")
        if MODE == "slow start":
            print("starting", flush=True)
            await asyncio.sleep(600)
        router = await self.transport.router(self.config.endpoints.engines)
        return {"engines": router.endpoint}

    async def run(self):
        if MODE == "group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.refuse())
        if MODE == "bug":
            raise RuntimeError("a bug")
        await self.drained.wait()
        print("draining", flush=True)
        if MODE == "slow drain":
            await asyncio.sleep(600)
        if MODE == "short drain":
            await asyncio.sleep(0.3)

    async def refuse(self):
        raise ConfigError("x = 1: must be 2")

    def drain(self):
        self.drained.set()

config = Config(
    endpoints=Endpoints(engines=sys.argv[3] if len(sys.argv) > 3 else "tcp://127.0.0.1:0"),
    log=LogConfig(format="json"),
)
sys.exit(run_process("echo", Echo, config, int(sys.argv[2])))
"""


class Child:
    def __init__(self, mode, *args):
        self.ready, theirs = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, mode, str(theirs), *args],
            pass_fds=[theirs],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(theirs)

    def read_ready(self):
        """Return all that was written to the ready descriptor, until it is closed."""
        data = b""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if select.select([self.ready], [], [], 1.0)[0]:
                chunk = os.read(self.ready, 4096)
                if not chunk:
                    return data.decode()
                data += chunk
        raise TimeoutError("the child never became ready")

    def wait_for_line(self, text):
        assert self.process.stdout.readline().strip() == text

    def finish(self):
        """Return (exit code, log lines)."""
        _, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, err

    def close(self):
        self.process.kill()
        self.process.communicate(timeout=DEADLINE)
        os.close(self.ready)


@pytest.fixture
def child():
    made = []

    def make(*args):
        made.append(Child(*args))
        return made[-1]

    yield make
    for each in made:
        each.close()


def logged(err):
    """Every line of a JSON log is JSON."""
    return [json.loads(line) for line in err.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(child, number):
    process = child("serve")
    ready = json.loads(process.read_ready())
    assert (ready["service"], ready["pid"]) == ("echo", process.process.pid)
    assert ready["endpoints"]["engines"].startswith("tcp://127.0.0.1:")
    assert not ready["endpoints"]["engines"].endswith(":0")
    process.process.send_signal(number)
    code, err = process.finish()
    assert code == 0
    assert [line["event"] for line in logged(err)] == ["ready", "draining", "drained"]
    assert {line["service"] for line in logged(err)} == {"echo"}


def test_a_second_signal_stops_at_once(child):
    process = child("slow drain")
    process.read_ready()
    process.process.terminate()
    process.wait_for_line("draining")
    time.sleep(2 * SAME_SECONDS)
    process.process.terminate()
    code, err = process.finish()
    assert code == 128 + signal.SIGTERM
    assert "Traceback" not in err


def test_a_signal_told_twice_at_once_drains(child):
    process = child("short drain")
    process.read_ready()
    process.process.terminate()
    process.wait_for_line("draining")
    process.process.terminate()
    code, err = process.finish()
    assert code == 0
    assert [line["event"] for line in logged(err)] == ["ready", "draining", "drained"]


def test_a_signal_while_starting_stops_at_once(child):
    process = child("slow start")
    process.wait_for_line("starting")
    process.process.terminate()
    assert process.finish()[0] == 128 + signal.SIGTERM
    assert process.read_ready() == ""


def test_a_signal_while_closing_hides_no_failure(child):
    process = child("slow close")
    process.wait_for_line("closing")
    process.process.terminate()
    code, err = process.finish()
    assert code == 2
    assert "Traceback" not in err
    assert logged(err)[-1]["error"] == "engine.model = x: not a model folder"


@pytest.mark.parametrize(
    ("mode", "says", "kind"),
    [("fails", "engine.model = x: not a model folder", "engine"), ("group", "x = 1: must be 2", "config")],
)
def test_an_expected_failure_is_one_line_and_exit_code_2(child, mode, says, kind):
    process = child(mode)
    told = process.read_ready()
    code, err = process.finish()
    assert code == 2
    if mode == "fails":  # the other one was ready before
        said = json.loads(told)
        assert (said["service"], said["error"], said["code"]) == ("echo", says, kind)
    last = logged(err)[-1]
    assert (last["event"], last["error"], last["code"], last["level"]) == ("stopped", says, kind, "error")
    assert "Traceback" not in err


def test_an_address_in_use_is_an_expected_failure(child):
    first = child("serve")
    endpoint = json.loads(first.read_ready())["endpoints"]["engines"]
    code, err = child("serve", endpoint).finish()
    assert code == 2
    assert endpoint in logged(err)[-1]["error"]


def test_a_bug_keeps_its_traceback(child):
    code, err = child("bug").finish()
    assert code == 1
    assert "RuntimeError: a bug" in err


def test_nobody_reading_readiness_is_no_failure(child):
    process = child("serve")
    os.close(process.ready)
    process.ready = os.open(os.devnull, os.O_RDONLY)
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and '"ready"' not in (line := process.process.stderr.readline()):
        assert line
    process.process.terminate()
    assert process.finish()[0] == 0


def test_a_process_that_leaves_has_said_all_and_takes_no_module_apart():
    code = textwrap.dedent(
        """
        import atexit, sys, threading
        from seer.common.process.leave import leave

        class Kept:
            def __del__(self):
                print("taken apart", flush=True)

        kept = Kept()
        threading.Thread(target=threading.Event().wait).start()
        atexit.register(print, "registered", end="")
        print("said", end=" ")
        leave(7)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "said registered", "")


def test_console_logs_name_the_service_and_respect_the_level():
    code = textwrap.dedent(
        """
        import logging
        from seer.common.config import LogConfig
        from seer.common.process.log import configure, get_logger
        log = get_logger()
        log.warning("before configure")
        configure(LogConfig(level="warning"), "svc")
        log.info("hidden")
        log.warning("shown", value=3)
        logging.getLogger("lib").warning("from a library %d", 7)
        logging.getLogger("lib").log(35, "odd level")
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert result.stdout == ""
    before, shown, library, odd = result.stderr.splitlines()
    assert "before configure" in before
    for word in ("shown", "value=3", "service=svc"):
        assert word in shown
    assert "from a library 7" in library
    assert "odd level" in odd
