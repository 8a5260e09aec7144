"""Steps with several paths on GPUs: the kernels leave all memory as `PathOps` does on CPUs.

Without a GPU they run in Triton's interpreter, by `make kernel-test`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="no triton: builds of torch for GPUs bring it, `make kernel-test` too")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU: `make kernel-test` runs this in Triton's interpreter", allow_module_level=True)

from seer.services.engine.vllm.drafts.path_layout import lay_out  # noqa: E402 - after torch and triton
from seer.services.engine.vllm.drafts.path_ops import Inputs, PathOps, Rows  # noqa: E402
from seer.services.engine.vllm.drafts.triton_paths import TritonPathOps  # noqa: E402

pytestmark = pytest.mark.vllm
BLOCKS, SIZE, COLUMNS, WIDTH = 40, 4, 8, 3


def starts(sizes):
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


class Memory:
    """All that a step reads and writes, of the same numbers for each `seed`."""

    def __init__(self, seed: int, ops: type[PathOps], device: str, *, gaps: bool = False) -> None:
        random, noise = Random(seed), np.random.default_rng(seed)
        self.device = device
        n = random.randint(1, 4)
        places, logits = {}, []
        for request in range(n):
            each, paths = random.randint(1, 4), random.choice([1, 2, 3])
            entries = random.randint(0, paths * each + paths - 1)
            places[request] = list(range(each, entries, each + 1))
            logits.append(entries + 1)
        lengths = [count + random.choice([0, 0, 2]) for count in logits]
        self.layout = layout = lay_out(
            lengths, logits, {r: p for r, p in places.items() if p}, {3}, random.randint(0, 6)
        )
        ends = starts(layout.lengths)
        self.rows = Rows(
            int(layout.lengths[layout.further].max(initial=1)),
            *(self.on(each) for each in (
                layout.owners, layout.paths, layout.shorter, layout.shifts, layout.further, layout.firsts,
                layout.choices, starts(layout.drafts + 1), np.append(ends, ends[-1]),
            )),
        )  # fmt: skip
        before = [random.randint(0, COLUMNS * SIZE - length) for length in lengths]
        positions = np.concatenate(
            [np.arange(b, b + length) for b, length in zip(before, lengths, strict=True)]
        )
        local = np.concatenate([np.arange(count) for count in logits])
        ids = noise.integers(0, 99, len(positions))
        self.inputs = Inputs(
            self.on(positions), self.on(local.astype(np.int32)), self.on(ids.astype(np.int32))
        )
        self.lengths = self.on(
            np.array([b + length for b, length in zip(before, lengths, strict=True)], np.int32)
        )
        self.contexts = self.on(np.zeros(len(layout.owners) + 2, np.int32))
        free = iter(noise.permutation(np.arange(1, BLOCKS)).tolist())
        table = [
            [next(free) for _ in range(COLUMNS)] if request < 3 else [0] * COLUMNS for request in range(n)
        ]
        self.table = self.on(np.array(table, np.int32)[layout.owners])
        self.slots = self.on(noise.integers(0, 999, len(positions)))
        spare = (
            [next(free) for _ in range(len(layout.further) * WIDTH)]
            if n < 3
            else list(range(BLOCKS, BLOCKS + 60))
        )
        self.scratch = self.on(np.array(spare[: len(layout.further) * WIDTH], np.int32).reshape(-1, WIDTH))
        total = BLOCKS + 60
        kernel_blocks = noise.standard_normal((2 * total, 2, SIZE, 2)).astype(np.float32)
        layer = self.on(noise.standard_normal((total, 2, SIZE, 10)).astype(np.float32))
        # Of blocks whose memory is in another order, or has gaps; and of such as are split in two.
        self.caches = [layer[..., ::2] if gaps else layer.transpose(1, 2), self.on(kernel_blocks)]
        self.ops = ops([*self.caches, self.caches[0]], total, SIZE)
        paths, width = len(layout.drafts), int(layout.drafts.max()) + 1
        truth = noise.integers(0, 3, width)
        drawn = np.where(noise.random((paths, width)) < 0.1, 9, truth)  # now and then paths disagree
        self.sampled = self.on(drawn)
        self.logprobs = self.on(noise.standard_normal((paths, width)).astype(np.float32))
        self.gained = self.on(np.array([random.randint(1, 1 + drafts) for drafts in layout.drafts], np.int32))

    def on(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def run(self) -> list[list[object]]:
        """Do all of a step's work; return what memory holds after."""
        found = []
        self.ops.begin(self.rows, self.inputs, self.lengths, self.contexts)
        if len(self.layout.further):
            blocks = self.ops.attend(self.rows, self.inputs.positions, self.table, self.slots, self.scratch)
            self.ops.copy_before(self.rows, blocks)
            found += [blocks.begins, blocks.own, *(cache.clone() for cache in self.caches)]
        winners, kept = self.ops.choose(self.rows, self.sampled, self.logprobs, self.gained)
        if len(self.layout.further):
            self.ops.copy_after(self.rows, blocks, winners, self.gained)
        inputs = self.inputs.positions, self.inputs.places, self.inputs.token_ids
        found += [
            *inputs,
            self.contexts,
            self.table,
            self.slots,
            winners,
            *kept,
            self.ops.decided,
            *self.caches,
        ]
        return [each.cpu().tolist() for each in found]


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=300 if DEVICE == "cuda" else 40, deadline=None)
def test_memory_is_as_cpus_leave_it(seed, gaps):
    memory = Memory(seed, TritonPathOps, DEVICE, gaps=gaps)
    assert (memory.ops._layers is None) == gaps
    assert memory.run() == Memory(seed, PathOps, "cpu", gaps=gaps).run()


def test_steps_of_all_kinds_are_compared():
    found = [Memory(seed, PathOps, "cpu") for seed in range(60)]
    for memory in found:
        memory.run()
    won, torn = np.sum([memory.ops.decided.tolist() for memory in found], axis=0)
    assert won > 5
    assert torn > 5
    assert {len(memory.layout.further) for memory in found} >= {0, 1, 2, 3}
    assert any(memory.layout.dropped for memory in found)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from seer.services.engine.vllm.drafts import path_kernels as kernels
from seer.services.engine.vllm.sampling.triton_kernels import LAUNCH

narrow = {"places", "token_ids", "lengths", "contexts", "table", "scratch", "own", "gained", "counts"}
numbers = {"stride", "columns", "width", "size", "pairs"}
for name, constants in (
    *((f"{each}_kernel", {"lanes": 8}) for each in ("begin", "attend", "choose")),
    *(("copy_kernel", {"after": after}) for after in (0, 1)),
):
    kernel = getattr(kernels, name)
    types = {n: "i32" if n in numbers else "*i32" if n in narrow else "*i64" for n in kernel.arg_names}
    types |= {n: "*fp32" for n in ("logprobs", "values") if n in types} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(LAUNCH))
"""


def test_they_compile_for_gpus():
    """The interpreter takes what the compiler does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
