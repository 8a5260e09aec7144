"""`seer top`: the state of a running system on one screen, once a second.

Invariants (tests/process/test_top.py, in a real pseudo-terminal):
- the terminal is as it was when the command ends, also by a signal or an error; only SIGKILL leaves it;
- a buffer that goes away is shown as away, with what was seen last, and found again;
- keys work at once, whether the buffer answers or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import Iterator
from typing import Self

from rich.console import Console
from rich.live import Live

from seer.common.config import LogConfig, SecurityConfig
from seer.common.errors import ConfigError, SeerError
from seer.common.net.keys import load_keys
from seer.common.net.transport.zmq import ZmqTransport
from seer.common.process.log import configure
from seer.common.wire import Status
from seer.observe.observer import Observer
from seer.observe.screen import Glance, screen, tokens_per_second

PERIOD_SECONDS = 1.0
ANSWER_SECONDS = 5.0

RATES = 20
"""How many of the last seconds the little diagram of tokens/s shows."""

QUIT = frozenset("qQ\x03\x04")
MOVES = {"\x1b[A": -1, "\x1bOA": -1, "k": -1, "\x1b[B": 1, "\x1bOB": 1, "j": 1, "\x1b[5~": -10, "\x1b[6~": 10}
"""Arrows as terminals send them in both modes, vi's letters, and page up and down."""

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Top:
    """One run of the command."""

    def __init__(self, observer: Observer, live: Live) -> None:
        self._observer, self._live = observer, live
        self._glance: Glance | None = None
        self._seen_at = 0.0
        self._rates: deque[float] = deque(maxlen=RATES)
        self._scroll, self._explained = 0, False
        self.ended = asyncio.Event()

    async def run(self) -> None:
        """Show the system until `ended`. Raises `SeerError` if the first question is not answered."""
        end = asyncio.ensure_future(self.ended.wait())
        while not self.ended.is_set():
            question = asyncio.ensure_future(self._observer.status(ANSWER_SECONDS))
            await asyncio.wait([end, question], return_when=asyncio.FIRST_COMPLETED)
            if self.ended.is_set():
                question.cancel()
            try:
                self._take(await question)
            except asyncio.CancelledError:
                break
            except SeerError as error:
                if self._glance is None:
                    raise
                self._glance = self._glance._replace(problem=str(error))
            self.draw()
            await asyncio.wait([end], timeout=PERIOD_SECONDS)

    def _take(self, status: Status) -> None:
        now = asyncio.get_running_loop().time()
        before = self._glance.now if self._glance else None
        if before is not None and before.incarnation != status.incarnation:
            before = None  # another incarnation of the buffer counts engines' starts anew
        glance = Glance(status, before, max(now - self._seen_at, 1e-3))
        self._rates.append(tokens_per_second(glance))
        self._glance, self._seen_at = glance._replace(rates=tuple(self._rates)), now

    def draw(self) -> None:
        """Draw the screen anew."""
        if self._glance is not None and self._live.is_started:
            width, height = self._live.console.size
            shown, self._scroll = screen(self._glance, width, height, self._scroll, self._explained)
            self._live.update(shown, refresh=True)

    def pressed(self, keys: str) -> None:
        """React to keys."""
        if not keys or not QUIT.isdisjoint(keys.split("\x1b")[0]):  # empty: the terminal is gone
            self.ended.set()
            return
        if keys.count("?") % 2:
            self._scroll, self._explained = 0, not self._explained
        for name, lines in MOVES.items():
            self._scroll = max(0, self._scroll + lines * keys.count(name))
        self.draw()


def show(endpoint: str, security: SecurityConfig) -> None:
    """Show the system behind the buffer at `endpoint`. Raises `SeerError`."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("seer top needs a terminal: use `seer status`, or `seer exporter` for metrics")
    configure(LogConfig(level="error"), "top")  # a warning amid the screen would only be in the way
    asyncio.run(_show(endpoint, security))


async def _show(endpoint: str, security: SecurityConfig) -> None:
    keys = load_keys(security)
    transport = ZmqTransport(keys=keys)
    observer = Observer(endpoint, transport, keys)
    try:
        with OwnTerminal() as terminal:
            top = Top(observer, terminal.live)
            with _watched(top, terminal):
                await top.run()
    finally:
        observer.close()
        await transport.close()


class OwnTerminal:
    """The screen to ourselves, and keys one by one; afterwards, all is as it was."""

    def __init__(self) -> None:
        self.stdin = sys.stdin.fileno()
        self.live = Live(
            console=Console(highlight=False, markup=False),
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._before = termios.tcgetattr(self.stdin)

    def __enter__(self) -> Self:
        tty.setcbreak(self.stdin, termios.TCSADRAIN)  # keys that were pressed before stay
        try:
            self.live.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.live.stop()
        finally:
            termios.tcsetattr(self.stdin, termios.TCSADRAIN, self._before)


@contextlib.contextmanager
def _watched(top: Top, terminal: OwnTerminal) -> Iterator[None]:
    """Pass on keys, sizes and signals."""
    loop = asyncio.get_running_loop()

    def pause() -> None:
        """Give the terminal back to the shell, until `fg`."""
        terminal.__exit__()
        os.kill(os.getpid(), signal.SIGSTOP)
        terminal.__enter__()
        top.draw()

    for number in ENDS:
        loop.add_signal_handler(number, top.ended.set)
    loop.add_signal_handler(signal.SIGWINCH, top.draw)
    loop.add_signal_handler(signal.SIGTSTP, pause)
    loop.add_reader(terminal.stdin, lambda: top.pressed(_read(terminal.stdin)))
    try:
        yield
    finally:
        loop.remove_reader(terminal.stdin)
        for number in (*ENDS, signal.SIGWINCH, signal.SIGTSTP):
            loop.remove_signal_handler(number)


def _read(stdin: int) -> str:
    try:
        return os.read(stdin, 256).decode(errors="replace")
    except OSError:
        return ""
