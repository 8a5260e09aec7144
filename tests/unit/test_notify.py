"""What systemd is told: the order of things, and silence when the event loop hangs."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from virtual_time import VIRTUAL

from seer.common.process.notify import BEAT_SECONDS, Notifier

pytestmark = VIRTUAL

DEADLINE = 60.0

_CHILD = """
import asyncio, os, sys, time
from seer.common.config import Config
from seer.common.process.service import run_process

class Stub:
    def __init__(self, config, transport, clock):
        self.drained = asyncio.Event()

    async def start(self):
        assert not [name for name in os.environ if name.startswith(("NOTIFY_", "WATCHDOG_"))]
        return {}

    async def run(self):
        if sys.argv[1] == "hang":
            await asyncio.sleep(0.3)
            print("hanging", flush=True)
            time.sleep(600)
        await self.drained.wait()

    def drain(self):
        self.drained.set()

sys.exit(run_process("stub", Stub, Config()))
"""


@pytest.fixture
def manager(tmp_path):
    """Stand in for systemd: its socket, and a way to read what came."""
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.settimeout(DEADLINE)
    receiver.bind(str(tmp_path / "notify"))
    yield receiver
    receiver.close()


@pytest.fixture
def child(manager):
    made = []

    def make(mode, **environ):
        environ = os.environ | {"NOTIFY_SOCKET": manager.getsockname()} | environ
        command = [sys.executable, "-c", _CHILD, mode]
        pipe = subprocess.PIPE
        made.append(subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True))
        return made[-1]

    yield make
    for each in made:
        each.kill()
        each.communicate(timeout=DEADLINE)


def received(manager):
    """Return what lies in the socket."""
    manager.setblocking(False)
    states = []
    while True:
        try:
            states.append(manager.recv(4096).decode())
        except BlockingIOError:
            manager.settimeout(DEADLINE)
            return states


def test_a_service_says_how_it_fares_from_start_to_end(child, manager):
    process = child("serve", WATCHDOG_USEC="200000")
    states = [manager.recv(4096).decode()]
    assert states[0].startswith("EXTEND_TIMEOUT_USEC=")
    while states.count("WATCHDOG=1") < 3:
        states.append(manager.recv(4096).decode())
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == 0, process.stderr.read()
    states += received(manager)
    assert states[1:3] == ["READY=1", "WATCHDOG=1"]
    assert set(states[3:]) == {"WATCHDOG=1", "STOPPING=1"}
    assert "STOPPING=1" in states[5:]


def test_a_loop_that_hangs_feeds_no_watchdog(child, manager):
    process = child("hang", WATCHDOG_USEC="100000")
    assert process.stdout.readline().strip() == "hanging"
    assert received(manager).count("WATCHDOG=1") >= 2
    time.sleep(1.0)  # ten times what the watchdog allows
    assert received(manager) == []


def test_a_watchdog_meant_for_another_process_is_not_fed(child, manager):
    child("serve", WATCHDOG_USEC="1000", WATCHDOG_PID="1")
    while manager.recv(4096) != b"READY=1":
        pass
    time.sleep(0.2)
    assert received(manager) == []


async def test_a_start_of_minutes_is_extended_all_the_while(manager):

    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "30000000"})
    beating = asyncio.create_task(notifier.beat())
    await asyncio.sleep(6.5 * BEAT_SECONDS)
    assert received(manager) == ["EXTEND_TIMEOUT_USEC=60000000"] * 7
    notifier.ready()
    await asyncio.sleep(31.0)
    assert received(manager) == ["READY=1", *["WATCHDOG=1"] * 3]
    beating.cancel()
    notifier.close()


async def test_the_file_is_written_for_as_long_as_the_loop_runs(tmp_path):
    file = tmp_path / "alive"
    file.write_text("ready\n")  # of a process before
    notifier = Notifier(environ := {"SEER_ALIVE_FILE": str(file)})
    assert (environ, file.read_text()) == ({}, "starting\n")
    beating = asyncio.create_task(notifier.beat())
    for says in ("starting\n", "ready\n"):
        for _ in range(3):
            os.utime(file, (0, 0))
            await asyncio.sleep(BEAT_SECONDS + 0.1)
            assert file.stat().st_mtime > 0
            assert file.read_text() == says
        notifier.ready()
        assert file.read_text() == "ready\n"
    file.unlink()
    file.mkdir()  # what cannot be written ends nothing
    await asyncio.sleep(2 * BEAT_SECONDS)
    assert not beating.done()
    beating.cancel()
    notifier.close()


async def test_without_systemd_nothing_happens():
    notifier = Notifier(environ := {"PATH": "/bin"})
    notifier.ready()
    notifier.stopping()
    await notifier.beat()  # returns
    notifier.close()
    assert environ == {"PATH": "/bin"}


def test_an_abstract_socket_is_reached_and_a_lost_one_survived():
    name = f"seer-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        notifier = Notifier({"NOTIFY_SOCKET": "@" + name})
        notifier.ready()
        assert receiver.recv(4096) == b"READY=1"
    notifier.stopping()  # nobody listens any more
    notifier.close()
