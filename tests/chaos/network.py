"""A network of one's own: a namespace per process, and between them a switch that cuts, delays and loses.

Each namespace has one device, whose other end is here: what goes from one to another passes through this
process. That needs no program and leaves nothing behind: namespaces end with this process.

Invariants:
- nothing gets out of the namespaces, and nothing in;
- what is not cut arrives in order, `delay` later; what is cut is dropped without a word, one way alone
  if so wished;
- each TCP segment is lost with probability `loss`, drawn from the seed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import fcntl
import itertools
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

T = TypeVar("T")

MTU = 8_000
"""Bytes; large, since every packet passes through Python."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCGIFFLAGS, _SIOCSIFFLAGS = (
    0x8916,
    0x891C,
    0x8922,
    0x8913,
    0x8914,
)
_IFF_UP = 0x1
_libc = ctypes.CDLL(None, use_errno=True)


def problem() -> str:
    """Say why there can be no such network here; empty when there can."""
    try:
        _aside(_enter_new)
    except OSError as error:
        return f"no network namespace can be made here: {error}"
    return ""


class Network:
    """Use in one event loop; `close` when done. `delay` is in seconds, one way; `loss` a share."""

    def __init__(self, seed: int = 0, delay: float = 0.0, loss: float = 0.0) -> None:
        self.delay, self.loss = delay, loss
        self.counters: Counter[str] = Counter()
        self._rand = random.Random(f"network {seed}")
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._spaces: dict[str, int] = {}
        self._devices: dict[bytes, int] = {}
        self._cut: set[tuple[bytes, bytes]] = set()
        self.entering = asyncio.Lock()

    def add(self, name: str) -> str:
        """Make a namespace and return its address."""
        address = f"10.77.0.{len(self._spaces) + 1}"
        device, self._spaces[name] = _aside(lambda: _make(address))
        self._devices[socket.inet_aton(address)] = device
        asyncio.get_running_loop().add_reader(device, self._forward, device)
        return address

    def address(self, name: str) -> str:
        """Return where the process `name` is."""
        return f"10.77.0.{list(self._spaces).index(name) + 1}"

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Have what this thread starts run in a namespace; hold `entering` meanwhile."""
        _set(self._spaces[name])
        try:
            yield
        finally:
            _set(self._home)

    def cut(self, sender: str, receiver: str) -> None:
        """Drop whatever goes from one to the other from now on; one way only."""
        self._cut.add((self._packed(sender), self._packed(receiver)))

    def cut_off(self, names: Collection[str]) -> None:
        """Drop whatever goes between these and all others, as if their node had lost its network."""
        for inside, outside in itertools.product(names, self._spaces.keys() - set(names)):
            self.cut(inside, outside)
            self.cut(outside, inside)

    def heal(self) -> None:
        """Let everything pass again."""
        self._cut.clear()

    def close(self) -> None:
        """Give up the namespaces; processes in them see nobody any more."""
        for device in self._devices.values():
            asyncio.get_running_loop().remove_reader(device)
            os.close(device)
        for space in (*self._spaces.values(), self._home):
            os.close(space)

    def _packed(self, name: str) -> bytes:
        return socket.inet_aton(self.address(name))

    def _forward(self, device: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(device, 65_536)
            except BlockingIOError:
                return
            sender, receiver = packet[12:16], packet[16:20]
            if packet[0] >> 4 != 4 or receiver not in self._devices:
                continue
            self.counters["packets"] += 1
            if (sender, receiver) in self._cut:
                self.counters["cut"] += 1
            elif self.loss and self._rand.random() < self.loss:
                self.counters["lost"] += 1
            elif self.delay:
                loop = asyncio.get_running_loop()
                loop.call_later(self.delay, self._deliver, receiver, packet)
            else:
                self._deliver(receiver, packet)

    def _deliver(self, receiver: bytes, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # its queue is full: lost, as on any switch; or closed
            os.write(self._devices[receiver], packet)


def _aside(work: Callable[[], T]) -> T:
    """Return what `work` returns in a thread of its own: namespaces are a thread's."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _enter_new() -> None:
    if _libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _set(space: int) -> None:
    if _libc.setns(space, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _make(address: str) -> tuple[int, int]:
    """Enter a new namespace with one device of that address; return the device and the namespace."""
    _enter_new()
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"link", _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, host in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.0")):
            where = struct.pack("16sH2x4s8x", b"link", socket.AF_INET, socket.inet_aton(host))
            fcntl.ioctl(control, request, where)
        fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si12x", b"link", MTU))
        for name in (b"lo", b"link"):
            _, flags = struct.unpack_from(
                "16sh", fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16s16x", name))
            )
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", name, flags | _IFF_UP))
    return device, os.open("/proc/thread-self/ns/net", os.O_RDONLY)
