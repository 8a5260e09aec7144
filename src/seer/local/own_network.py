"""A network for the processes of one machine's system alone: nobody else reaches the ports of its KV pool.

Mooncake authenticates nobody, and binds all interfaces whatever it is told. In a network namespace of its
own, which Linux lets ordinary users make, a system has a loopback and nothing else; its other sockets are
files. Files and devices are as before.

Invariants:
- a process that could not move keeps the network it had;
- no library that starts threads is imported: a process with threads could not move.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

from seer.common.config import Config
from seer.common.endpoints import is_local

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
_DEVICE = struct.Struct("16sh14x")

LOOPBACK = "127.0.0.1"


def for_pool(config: Config) -> str:
    """Enter a network of its own if the system will have a KV pool of its own over TCP; return a note for the
    user, or "". Call this while the process has one thread.
    """
    pool = config.pool
    own = pool.kind != "none" and config.engine.backend == "vllm" and is_local(f"tcp://{pool.master}")
    if not own or pool.protocol != "tcp":
        return ""
    why = enter()
    return why and f"note: whoever reaches this machine reaches the KV pool's ports, {pool.ports} ({why})"


def enter() -> str:
    """Move this process and its future children into a network of their own; return why that failed."""
    if sys.platform != "linux":
        return "only Linux has network namespaces"
    tried = os.fork()  # where it is forbidden, some steps may succeed all the same
    if not tried:
        try:
            _move()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    _, status = os.waitpid(tried, 0)
    if status:
        return f"no network namespace: {os.strerror(os.waitstatus_to_exitcode(status))}"
    _move()
    os.environ.setdefault("VLLM_HOST_IP", LOOPBACK)  # vLLM would look for a route to the world
    return ""


def _move() -> None:
    user, group = os.geteuid(), os.getegid()
    kinds = _NEW_NET if user == 0 else _NEW_NET | _NEW_USER
    if ctypes.CDLL(None, use_errno=True).unshare(kinds):
        raise OSError(ctypes.get_errno(), "unshare")
    if kinds & _NEW_USER:  # the same user and group as before: files keep their owners
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = _DEVICE.unpack(fcntl.ioctl(any_socket, _GET_FLAGS, _DEVICE.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, _SET_FLAGS, _DEVICE.pack(b"lo", flags | _UP))
