"""Where a device waits for drafts: it stops at a host function that makes them, in its own order of work.

Invariants:
- the host function is native code that never waits for Python's lock, and at most a tenth of a millisecond
  for feeds, so a device that waits for it never waits for Python;
- a step's memory is not used again before it is over. Two are under way on the stream, `STEPS` have memory;
  beside it, where no step waits for them, more may be: the host then waits for the oldest.
"""

from __future__ import annotations

import ctypes
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from seer import _native

STEPS = 4


class DraftGate:
    """Runs the drafts of steps: on a GPU as its stream comes to them, on a CPU at once.

    `rows` requests at most draw `width` tokens each, and draft one less.
    """

    def __init__(self, drafter: _native.StepDrafter, device: torch.device, rows: int, width: int) -> None:
        self._drafter, self._device, self._gpu = drafter, device, device.type == "cuda"
        self._memory = cycle([StepMemory(rows, width, self._gpu) for _ in range(STEPS)])
        self._staged = torch.zeros(rows * (width - 1), dtype=torch.int32, device=device)
        self._staged_scores = torch.zeros(rows * (width - 1), device=device)
        self._behind = False  # whether steps run beside the stream
        if self._gpu:
            self._beside = torch.cuda.Stream(device)
            self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
            self._launch.argtypes = [ctypes.c_void_p] * 3

    def draft(
        self, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.int64],
        sampled: torch.Tensor, num_sampled: torch.Tensor, k: int, paths: int = 1, tree: bool = False,
    ) -> StepMemory:  # fmt: skip
        """Draft `k` tokens after what rows [n] drew: `sampled` [n, w], `num_sampled` int32 [n] on the device.

        With k = 0 what was drawn is learnt, and nothing waits. See `_native.DraftStep` for `paths`; `tree`:
        with parents. Returns the step's memory, filled once it has run. Raises `RuntimeError` if CUDA
        refuses.
        """
        memory = next(self._memory)
        if memory.over is not None:
            memory.over.synchronize()
        memory.take(self._drafter, slots, generations, sampled.shape[1], k, paths, tree)
        if not self._gpu:
            memory.read(sampled, num_sampled)
            memory.step.run()
            return memory
        here = torch.cuda.current_stream(self._device)
        if k:
            if self._behind:
                here.wait_stream(self._beside)
            self._behind = False
            memory.read(sampled, num_sampled)
            self._call(memory, here)
            return memory
        self._beside.wait_stream(here)
        with torch.cuda.stream(self._beside):
            memory.read(sampled, num_sampled)
            self._call(memory, self._beside)
        for tensor in (sampled, num_sampled):
            tensor.record_stream(self._beside)
        self._behind = True
        return memory

    def on_device(self, memory: StepMemory) -> torch.Tensor:
        """Return a step's drafts, int32 [n, k], for what is launched next."""
        drafts = memory.drafts
        staged = self._staged[: drafts.numel()].view(drafts.shape)
        return staged.copy_(
            drafts, non_blocking=True
        )  # same type and layout: else the host would convert it now

    def scores_on_device(self, memory: StepMemory) -> torch.Tensor:
        """Return a step's scores, float32 [n, k], in the same order."""
        scores = torch.from_numpy(memory.scores)
        return self._staged_scores[: scores.numel()].view(scores.shape).copy_(scores, non_blocking=True)

    def _call(self, memory: StepMemory, stream: torch.cuda.Stream) -> None:
        code = self._launch(stream.cuda_stream, _native.RUN_DRAFT_STEP, memory.step.address)
        if code:
            raise RuntimeError(f"cuLaunchHostFunc failed with CUDA's error {code}")
        memory.over = stream.record_event(memory.over)


class StepMemory:
    """What a step reads and writes on the host: `drafts` [n, k] and `counts` [n], int32, `scores` [n, k].

    `parents` int32 [n, k], if drafts are trees. A GPU comes to `over` once the step has run.
    """

    step: _native.DraftStep
    drafts: torch.Tensor
    counts: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    parents: npt.NDArray[np.int32]
    over: torch.cuda.Event | None = None

    def __init__(self, rows: int, width: int, pinned: bool) -> None:
        ints = {"dtype": torch.int32, "pin_memory": pinned}
        self._sampled, self._num_sampled = torch.zeros(rows * width, **ints), torch.zeros(rows, **ints)
        self._drafts = torch.zeros(rows * (width - 1), **ints)
        self._counts = np.zeros(rows, np.int32)
        self._scores = torch.zeros(rows * (width - 1), pin_memory=pinned).numpy()
        self._parents = np.zeros(rows * (width - 1), np.int32)

    def take(
        self, drafter: _native.StepDrafter, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.int64],
        width: int, k: int, paths: int = 1, tree: bool = False,
    ) -> None:  # fmt: skip
        """Become the memory of a step of these rows."""
        n = len(slots)
        self._drawn, self._numbers = self._sampled[: n * width].view(n, width), self._num_sampled[:n]
        self.drafts, self.counts = self._drafts[: n * k].view(n, k), self._counts[:n]
        self.scores, self.parents = self._scores[: n * k].reshape(n, k), self._parents[: n * k].reshape(n, k)
        self.step = _native.DraftStep(
            drafter, slots, generations, self._drawn.numpy(), self._numbers.numpy(), self.drafts.numpy(),
            self.counts, self.scores, paths, self.parents if tree else None,
        )  # fmt: skip

    def read(self, sampled: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Copy what was drawn, in the order of the current stream."""
        self._drawn.copy_(sampled.to(torch.int32), non_blocking=True)
        self._numbers.copy_(num_sampled, non_blocking=True)
