"""`seer top` in a real pseudo-terminal: it follows the system, takes keys, and leaves the terminal as it was."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time

import pytest
from keyed_system import rolled, running

from seer.observe.top import ANSWER_SECONDS

LEFT = "\x1b[?1049l"
"""Leaves the alternate screen."""


class Terminal:
    """A pseudo-terminal of 80 by 24, and a program in it."""

    def __init__(self, command, environ):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.said = ""
        self.process = subprocess.Popen(
            command, env=os.environ | {"TERM": "xterm-256color"} | environ, start_new_session=True,
            stdin=self.slave, stdout=self.slave, stderr=self.slave,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.set_blocking(self.master, False)

    def read(self):
        """Read what is there now, a few kB at most; return whether there was any."""
        try:
            said = os.read(self.master, 2**16)
        except OSError:
            return False
        self.said += said.decode(errors="replace")
        return bool(said)

    async def until(self, pattern, seconds=40):
        """Wait for text on a screen that is drawn from now on."""
        self.said, deadline = "", time.monotonic() + seconds
        while not re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.said)):
            assert time.monotonic() < deadline, self.said[-3000:]
            assert self.process.poll() is None, self.said[-3000:]
            self.read()
            await asyncio.sleep(0.05)

    def press(self, keys):
        os.write(self.master, keys.encode())

    async def ended(self):
        """Wait for the end; return the exit code."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.said[-3000:]
            self.read()
            await asyncio.sleep(0.05)
        while self.read():
            pass
        return self.process.returncode

    async def until_restored(self):
        deadline = time.monotonic() + 20
        while not self.restored():
            assert time.monotonic() < deadline, (self.said[-500:], termios.tcgetattr(self.slave), self.before)
            self.read()
            await asyncio.sleep(0.05)

    def restored(self):
        return termios.tcgetattr(self.slave) == self.before and LEFT in self.said and "\x1b[?25h" in self.said

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


def top(system):
    security = system.security("observer-top")
    command = [sys.executable, "-m", "seer.cli.main", "top", "--connect", system.config.endpoints.trainers]
    return Terminal(command, {"SEER_SECURITY__KEY": security.key, "SEER_SECURITY__SERVER": security.server})


async def test_it_follows_the_system_and_leaves_the_terminal_as_it_was(tmp_path):
    async with running(tmp_path) as system, system.client("trainer-run") as client:
        rolling = asyncio.create_task(rolled(client, 0, 800))
        terminal, other = top(system), top(system)
        try:
            await terminal.until(r"2 engines[\s\S]*\d+/32 responses[\s\S]*e0[\s\S]*longest by prompt")
            terminal.press("?")
            await terminal.until(r"booked +share of them[\s\S]*\? back")
            terminal.press("?")
            await terminal.until(r"longest by prompt[\s\S]*\? what words mean")
            terminal.press("\x1b[B")  # scrolls, and does not end it
            await terminal.until("2 engines")
            await rolling
            terminal.process.send_signal(signal.SIGTSTP)
            await terminal.until_restored()
            terminal.process.send_signal(signal.SIGCONT)
            await terminal.until("no rollout is open")
            system.children["buffer"].kill_group()
            await system.children["buffer"].gone(10)
            await terminal.until("away, and asked again")
            await system.start("buffer", "buffer", "server")
            await terminal.until(r"up \d+ s[\s\S]*q quit", 60)
            terminal.press("q")
            assert await terminal.ended() == 0
            assert terminal.restored()
            await other.until("seer top")
            other.process.send_signal(signal.SIGTERM)
            assert await other.ended() == 0
            assert other.restored()
        finally:
            terminal.close()
            other.close()


async def test_an_error_leaves_the_terminal_as_it_was_too():
    program = (
        "from seer.observe.top import OwnTerminal\n"
        "with OwnTerminal() as own:\n    own.live.update('shown', refresh=True)\n    raise RuntimeError('oops')\n"
    )
    terminal = Terminal([sys.executable, "-c", program], {})
    try:
        assert await terminal.ended() == 1
        assert "shown" in terminal.said
        assert terminal.said.index(LEFT) < terminal.said.index("oops")
        assert terminal.restored()
    finally:
        terminal.close()


async def test_a_key_ends_it_before_the_first_answer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = ["top", "--connect", f"tcp://127.0.0.1:{silent.getsockname()[1]}"]
        terminal = Terminal([sys.executable, "-m", "seer.cli.main", *command], {})
        try:
            await asyncio.to_thread(silent.accept)
            began = time.monotonic()
            terminal.press("q")
            assert await terminal.ended() == 0
            assert time.monotonic() - began < ANSWER_SECONDS - 1
            assert terminal.restored()
        finally:
            terminal.close()


@pytest.mark.parametrize("command", [["top"], ["top", "--connect", "tcp://127.0.0.1:1"]])
def test_without_a_terminal_it_says_what_to_use(command):
    done = subprocess.run(
        [sys.executable, "-m", "seer.cli.main", *command], capture_output=True, text=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2
    assert "seer status" in done.stderr or "--connect" in done.stderr
