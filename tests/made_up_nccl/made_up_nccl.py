"""A made-up NCCL for vLLM's transfer engines on CPUs: vLLM's classes are real, what they call of CUDA is not.

As with NCCL, a rank waits without a deadline for others, a broadcast that is cut off leaves its tensor as it was,
and a communicator that was destroyed does nothing and says nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

LONG = timedelta(hours=1)

stores: list[TCPStore] = []
"""Where the groups meet whose ids this process made."""

over = threading.Event()
"""Ends the wait for ranks: a thread in C++ at the end of a process aborts it."""


class Library:
    """Stands for vLLM's `NCCLLibrary`: an id says where the group meets."""

    def ncclGetUniqueId(self) -> SimpleNamespace:  # noqa: N802 - NCCL's
        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return SimpleNamespace(internal=str(stores[-1].port).encode().ljust(128, b"\0"))


class Communicator:
    """Stands for vLLM's `PyNcclCommunicator`, over Gloo."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int) -> None:
        self.disabled, self.rank, self.device = False, rank, torch.device("cpu")
        port = int(unique_id.rstrip(b"\0"))
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LONG)
        ended = over
        store.set(f"here {rank}", "")
        while not store.check([f"here {each}" for each in range(world_size)]):
            if ended.is_set():
                raise RuntimeError("the test is over")
            time.sleep(0.005)
        options = ProcessGroupGloo._Options()
        options._timeout = LONG
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, options)

    @classmethod
    def from_unique_id_bytes(
        cls, unique_id: bytes, rank: int, world_size: int, device: object
    ) -> Communicator:
        return cls(unique_id, rank, world_size)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        if self.disabled:
            return
        options = BroadcastOptions()
        options.rootRank, options.timeout = src, LONG
        arriving = tensor.clone()
        work = self._group.broadcast([arriving], options)
        while not work.is_completed():
            if self.disabled:
                return
            time.sleep(0.001)
        with contextlib.suppress(RuntimeError):  # a rank is gone: NCCL goes on waiting
            work.wait()
            tensor.copy_(arriving)
            return
        while not self.disabled:
            time.sleep(0.001)

    def destroy(self) -> None:
        self.disabled = True
        # Never freed: that would wait for a broadcast under way.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group.abort()


def owners() -> list[tuple[object, str]]:
    """Return what `install` changes of torch."""
    names = "current_device_index", "set_device_index", "synchronize"
    return [(torch.cuda, "stream"), *((torch.accelerator, name) for name in names)]


def install() -> None:
    """Have vLLM use these in this process, for good."""
    from vllm.distributed.device_communicators import pynccl, pynccl_wrapper
    from vllm.distributed.weight_transfer import packed_tensor

    global over  # ranks of tests before have theirs, which is set
    over = threading.Event()
    stream = SimpleNamespace(synchronize=lambda: None)
    pynccl.PyNcclCommunicator = Communicator
    pynccl_wrapper.NCCLLibrary = Library
    packed_tensor._get_streams = lambda device, count: (stream,) * count
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    for name, made_up in {
        "current_device_index": lambda: 0, "set_device_index": lambda _: None, "synchronize": lambda: None,
    }.items():  # fmt: skip
        setattr(torch.accelerator, name, made_up)
