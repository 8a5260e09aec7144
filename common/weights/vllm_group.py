"""What vLLM's NCCL transfer engines lack on both sides: deadlines, and a way to meet without pickle.

vLLM's communicator waits for ever for a rank that does not come, and once it is off, it returns without data
and without an error. Groups meet by NCCL's own id, which `broadcast_group.gather` gives to all ranks: vLLM's
other way, a store, has each rank unpickle what anybody may have put there.

Invariants (tests/unit/test_vllm_transfer.py):
- a call that goes `seconds` without a step is given up, and has as long to end; it raises `TimeoutError`,
  whatever it returns then;
- a communicator that is off is refused.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

T = TypeVar("T")

POLL_SECONDS = 0.02


class Watch:
    """Runs calls that may never return, in threads of their own that use the GPU `device`.

    One that goes `seconds` without a `step`, or still runs when `stopped()` is true, is given up.
    """

    def __init__(self, device: int, seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        self._device, self._seconds, self._stopped = device, seconds, stopped
        self._last = 0.0

    def step(self) -> None:
        """Say that the call goes on."""
        self._last = time.monotonic()

    def run(self, call: Callable[[], T], give_up: Callable[[], None] = lambda: None) -> T:
        """Return what `call` returns. Raises what it raises, or `TimeoutError` after `give_up`, to end it."""
        done: Future[T] = Future()
        self.step()
        threading.Thread(target=self._call, args=(call, done), daemon=True).start()
        while not done.done():
            if self._stopped() or time.monotonic() > self._last + self._seconds:
                give_up()
                wait([done], self._seconds)
                raise TimeoutError(f"vLLM's transfer did not go on for {self._seconds:g} s")
            wait([done], POLL_SECONDS)
        return done.result()

    def _call(self, call: Callable[[], T], done: Future[T]) -> None:
        try:
            torch.accelerator.set_device_index(self._device)  # threads begin with device 0
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
            done.set_exception(error)


def new_id() -> str:
    """Return NCCL's id for one group, in base64; this process is its rank 0. Raises `OSError`."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return base64.b64encode(bytes(NCCLLibrary().ncclGetUniqueId().internal)).decode()


def usable(group: Any) -> Any:  # noqa: ANN401 - vLLM's `PyNcclCommunicator`
    """Return the group. Raises `RuntimeError` for one that is off: it would send and receive nothing."""
    if group.disabled:
        raise RuntimeError("vLLM has NCCL off here: unset VLLM_DISABLE_PYNCCL")
    return group
