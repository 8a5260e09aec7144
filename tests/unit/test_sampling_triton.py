"""The GPU's kernels: the same tokens as torch and the native kernel, and what they compile to.

On a machine with a GPU the compiled kernels run; elsewhere `make kernel-test` runs them in Triton's
interpreter. That is numpy, which never fuses a product and a sum: what the compiler does is read
from the PTX, which needs no GPU.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="no triton: builds of torch for GPUs bring it, `make kernel-test` too")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU: `make kernel-test` runs this in Triton's interpreter", allow_module_level=True)

from sampling_rows import Slots, check_slots, pack, random_batch, random_logits  # noqa: E402 - after torch and triton

from seer.services.engine.vllm.sampling import (  # noqa: E402
    torch_sampler,
    triton_kernels,
    triton_launch,
    triton_sampler,
    triton_slots,
    vectors,
)
from seer.services.engine.vllm.sampling.rows import RECORD, SamplingTable  # noqa: E402
from seer.services.engine.vllm.sampling.sampler import sample_rows  # noqa: E402

pytestmark = pytest.mark.vllm
EXAMPLES = 300 if DEVICE == "cuda" else 20  # the interpreter takes 0.1 s a row

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from seer.services.engine.vllm.sampling import triton_kernels as kernels

types = {"logits": "*fp32", "words": "*i64", "cut": "*i64", "edited": "*i64", "found": "*i64", "lists": "*i32"}
types |= {"histories": "*i32", "extras": "*i32", "table": "*i64", "faults": "*i64", "slots": "*i64"}
types |= {"places": "*i32", "indices": "*i64", "positions": "*i64", "edits": "*i64", "starts": "*i32", "inputs": "*i32"}
types |= {"sampled": "*i64", "values": "*fp32", "gained": "*i32"}
types |= {"marks": "*i32", "biases": "*fp32", "histograms": "*i64", "tokens": "*i32", "logprobs": "*fp32"}
options = kernels.LAUNCH | ({"enable_fp_fusion": True} if sys.argv[2] == "fused" else {})
cuts = [("cut_kernel", {"weighed": weighed, "begins": begins}) for weighed in (0, 1) for begins in (0, 1)]
others = [("top_kernel", {}), ("mark_kernel", {}), ("accept_kernel", {"lanes": 8})]
others += [("rows_kernel", {"edited": edited}) for edited in (0, 1)]
for name, constants in (("draw_kernel", {"slots": 64}), *cuts, *others):
    kernel = getattr(kernels, name)
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    print(triton.compile(source, target=target, options=options).asm["ptx"])
"""


def same(logits, params):
    """Sample with the kernel, assert that torch and the native kernel agree, and return the tokens."""
    tokens, logprobs = triton_sampler.sample(logits.to(DEVICE), params)
    expected, expected_logprobs = torch_sampler.sample(logits, params)
    assert tokens.tolist() == expected.tolist()
    assert tokens.tolist() == sample_rows(logits, params)[0].tolist()
    torch.testing.assert_close(logprobs.cpu(), expected_logprobs, atol=5e-5, rtol=2e-4, equal_nan=True)
    return tokens.cpu()


def bits(x):
    return x.cpu().view(torch.int32).tolist()


def test_it_draws_the_vectors():
    vectors.self_test(triton_sampler.sample, DEVICE)


def test_it_is_what_gpus_sample_by(monkeypatch):
    class OnGpu(list):
        device = torch.device("cuda")

    logits, params = OnGpu(), SamplingTable([]).step([])
    monkeypatch.setattr(triton_sampler, "sample", lambda *given: given)
    assert sample_rows(logits, params) == (logits, params)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 66, 1000, 2048, 2049, 5003]), st.integers(1, 5))
@settings(max_examples=EXAMPLES)
def test_random_rows(seed, vocab, rows):
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, vocab, rows)
    before = logits.clone()
    table = SamplingTable(random_batch(rng, vocab, rows))
    history = rng.integers(-1, vocab + 1, (rows, 80)).astype(np.int32)
    same(logits, table.step(rng.integers(20, 80, rows), history))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [32_768 + 7, 262_144] if DEVICE == "cuda" else [32_768 + 7])
def test_large_vocabularies(vocab):
    rng = np.random.default_rng(vocab)
    x = torch.from_numpy(rng.normal(size=(4, vocab)).astype(np.float32) * 3)
    x[3, vocab - 1] = 30.0
    kinds = [{}, {"top_p": 0.95, "repetition_penalty": 1.2}, {"top_k": 5000, "top_p": 0.9}, {"min_p": 0.01}]
    requests = [pack(vocab, key=i, logprobs="processed", **kind) for i, kind in enumerate(kinds)]
    history = rng.integers(0, vocab, (4, 300)).astype(np.int32)
    same(x, SamplingTable(requests).step([300] * 4, history))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=EXAMPLES // 4)
def test_cuts_among_zeros_denormals_and_extremes(seed):
    rng = np.random.default_rng(seed)
    rows, vocab = 6, 66
    values = np.array(
        [-0.0, 0.0, 1e-45, -1e-45, 1e-38, -1e-38, 1.0, -1.0, 3e38, -3e38, -math.inf], np.float32
    )
    logits = torch.from_numpy(rng.choice(values[: rng.integers(2, 12)], (rows, vocab)))
    requests = [
        pack(vocab, key=seed + row, top_k=int(rng.integers(0, vocab)), top_p=float(rng.uniform(1e-9, 1.0)))
        for row in range(rows)
    ]
    same(logits, SamplingTable(requests).step(3))


def test_rows_that_cannot_be_sampled():
    logits = torch.zeros(6, 70)
    logits[0, 3], logits[1, 69], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 5] = math.inf  # masked, but no number
    logits[4] = 3e38  # infinite after the division
    requests = [pack(70, top_p=0.9, top_k=3)] * 3
    requests += [pack(70, min_tokens=9, stop_ids=(5,)), pack(70, temperature=0.1), pack(70)]
    assert (same(logits, SamplingTable(requests).step([1] * 6)) >= 0).tolist() == [False] * 5 + [True]


def test_several_launches_drafts_and_strides(monkeypatch):
    rng = np.random.default_rng(8)
    vocab, drafts = 50, [3, 0, 2]
    table = SamplingTable(random_batch(rng, vocab, 3))
    history = rng.integers(0, vocab, (3, 40)).astype(np.int32)
    params = table.step([25, 30, 20], history, drafts, rng.integers(0, vocab, 5).astype(np.int32))
    wide = torch.from_numpy(rng.normal(size=(8, 64)).astype(np.float32))
    expected = same(wide[:, :vocab], params)
    monkeypatch.setattr(triton_sampler, "_SLAB_ROWS", 3)
    assert torch.equal(same(wide[:, :vocab].t().contiguous().t(), params), expected)


VOCAB = 3 * triton_kernels.BLOCK.value + 5


def test_neither_tokens_nor_logprobs_depend_on_the_batch():
    rng = np.random.default_rng(4)
    rows = 24
    logits = random_logits(rng, VOCAB, rows).to(DEVICE)
    table = SamplingTable(random_batch(rng, VOCAB, rows))
    params = table.step(rng.integers(20, 60, rows), rng.integers(0, VOCAB, (rows, 60)).astype(np.int32))
    tokens, logprobs = triton_sampler.sample(logits, params)
    for start, stop in ((0, 1), (1, 2), (5, 6), (7, 20), (23, 24)):
        part, part_logprobs = triton_sampler.sample(logits[start:stop], params.part(start, stop))
        assert torch.equal(part, tokens[start:stop])
        assert bits(part_logprobs) == bits(logprobs[start:stop])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_read_as_their_float32_copy(dtype):
    rng = np.random.default_rng(5)
    rows = 12
    logits = torch.from_numpy(rng.normal(size=(rows, VOCAB)).astype(np.float32) * 4).to(dtype)
    table = SamplingTable(random_batch(rng, VOCAB, rows))
    params = table.step(rng.integers(20, 60, rows), rng.integers(0, VOCAB, (rows, 60)).astype(np.int32))
    same(logits, params)
    tokens, logprobs = triton_sampler.sample(logits.to(DEVICE), params)
    copied, copied_logprobs = triton_sampler.sample(logits.float().to(DEVICE), params)
    assert torch.equal(tokens, copied)
    assert bits(logprobs) == bits(copied_logprobs)


def test_the_same_call_gives_the_same_again():
    rng = np.random.default_rng(10)
    rows, vocab = (512, 32_768) if DEVICE == "cuda" else (4, VOCAB)
    logits = torch.from_numpy(np.round(rng.normal(size=(rows, vocab)) * 12).astype(np.float32)).to(DEVICE)
    kinds = [{"top_k": 1000, "top_p": 0.9}, {"top_p": 0.3}, {"top_k": 7}, {"top_p": 1 - 1e-6}]
    requests = [pack(vocab, key=row, logprobs="processed", **kinds[row % 4]) for row in range(rows)]
    params = SamplingTable(requests).step(7)
    tokens, logprobs = triton_sampler.sample(logits, params)
    expected, expected_logprobs = torch_sampler.sample(logits, params)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=5e-5, rtol=2e-4)
    for _ in range(50 if DEVICE == "cuda" else 1):  # threads that race do not always lose
        again, again_logprobs = triton_sampler.sample(logits, params)
        assert torch.equal(again, tokens)
        assert bits(again_logprobs) == bits(logprobs)


def test_logits_may_lie_anywhere():
    rng = np.random.default_rng(6)
    rows = 3
    logits = torch.from_numpy(rng.normal(size=(rows, VOCAB)).astype(np.float32) * 4).to(DEVICE)
    params = SamplingTable([pack(VOCAB, key=row, top_p=0.9) for row in range(rows)]).step(7)
    tokens, logprobs = triton_sampler.sample(logits, params)
    for before in (1, 2, 3):
        moved = torch.zeros(rows, VOCAB + 64, device=DEVICE)[:, before : before + VOCAB]
        moved.copy_(logits)
        there, there_logprobs = triton_sampler.sample(moved, params)
        assert torch.equal(there, tokens)
        assert bits(there_logprobs) == bits(logprobs)


def test_sums_have_no_order():
    rng = np.random.default_rng(7)
    block = triton_kernels.BLOCK.value
    logits = torch.from_numpy(rng.normal(size=(1, 2 * block)).astype(np.float32) * 4)
    logits[0, 5] = 30.0
    others = np.concatenate([np.arange(5), np.arange(6, block)])
    order = np.arange(2 * block)
    order[others], order[block:] = rng.permutation(others), block + rng.permutation(block)
    params = SamplingTable([pack(2 * block, temperature=0.0)]).step(7)
    _, logprobs = triton_sampler.sample(logits.to(DEVICE), params)
    _, permuted = triton_sampler.sample(logits[:, order].to(DEVICE), params)
    assert bits(permuted) == bits(logprobs)


def test_the_lowest_of_equals_wins_across_parts():
    block = triton_kernels.BLOCK.value
    ids = [block - 1, block, 2 * block, VOCAB - 1]
    logits = torch.full((len(ids), VOCAB), -math.inf)
    for row in range(len(ids)):
        logits[row, ids[row:]] = -0.0
        logits[row, ids[row + 1 :]] = 0.0
    params = SamplingTable([pack(VOCAB, temperature=0.0, logprobs="processed", top_k=2)] * len(ids)).step(3)
    assert same(logits, params).tolist() == ids


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=5e-5, rtol=2e-4)


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=EXAMPLES // 2)
def test_rows_by_slot_and_accepted_drafts_are_the_hosts(seed, several):
    with pytest.MonkeyPatch.context() as patch:
        if several:  # launches of so many rows
            patch.setattr(triton_sampler, "_SLAB_ROWS", 3)
        check_slots(
            seed, triton_slots.TritonSlotRows, DEVICE, same=close, steps=100 if DEVICE == "cuda" else 4
        )


def described(logits, words, edits, cuts, sent, _):
    """Return all that the last kernels read of rows: records, marks and biases by row, and which are cut."""
    (rows, vocab), width = logits.shape, triton_kernels.WORDS.value
    words = words[: rows * width].cpu().numpy().reshape(rows, width)
    records = words[:, : triton_kernels.RECORD_WORDS].copy().view(RECORD)[:, 0]
    elsewhere = ("extra_start", "stop_start", "bias_start")
    found = {name: records[name].tolist() for name in RECORD.names if name not in elsewhere}
    for name, edit in zip(("mark", "bias"), edits, strict=True):
        places = words[:, triton_kernels.PLACES[name]]
        one = edit[: (places.max() + 1) * vocab].view(-1, vocab).cpu().numpy()
        found[name] = [one[place].tolist() if place >= 0 else [0] * vocab for place in places]
    others = [
        place for name, place in triton_kernels.PLACES.items() if name not in ("mark", "bias", "history")
    ]
    found["others"] = words[:, others].tolist()
    found["cuts"] = [
        sent[at:].view(torch.int64)[:count].tolist() for at, count in (cuts._cut, cuts._top_k, cuts._top_p)
    ]
    return found


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=EXAMPLES * 2)
def test_the_last_kernels_read_the_same_of_rows_by_slot(seed):
    rng, seen = np.random.default_rng(seed), []
    slots = Slots(rng, 66, device=DEVICE)
    rows = triton_slots.TritonSlotRows(slots.history)
    with pytest.MonkeyPatch.context() as patch:
        for module in (triton_sampler, triton_slots):
            patch.setattr(module, "draw_rows", lambda *given: seen.append(described(*given)))
        for _ in range(10):
            slots.fill(rows)
            batch, params, *_ = slots.step(int(rng.choice([0, 3, 5])))
            logits = torch.zeros(len(params.records), 66, device=DEVICE)
            triton_sampler.sample(logits, params)
            rows.draw(logits, batch)
            expected, found = seen[-2:]
            assert found == expected


PLAIN, CUT, LISTS = {}, {"top_p": 0.9}, {"logit_bias": {3: 0.5}, "presence_penalty": 1.0}


def test_a_step_by_slot_sends_only_what_changed(monkeypatch):
    rng, sent = np.random.default_rng(11), []
    slots = Slots(rng, VOCAB, 4, device=DEVICE)
    rows = triton_slots.TritonSlotRows(slots.history)
    to = triton_sampler.Buffer.to
    monkeypatch.setattr(
        triton_sampler.Buffer, "to", lambda self, device: sent.append(self) or to(self, device)
    )

    def buffers(most=0):
        batch, params, *_ = slots.step(most, everyone=True)
        before = len(sent)
        rows.draw(torch.zeros(len(params.records), VOCAB, device=DEVICE), batch)
        return len(sent) - before

    for kind, expected in ((PLAIN, [1, 0, 0]), (CUT, [2, 0, 0]), (LISTS, [2, 0, 0])):
        for slot in range(4):
            slots.come(slot, rows, pack(VOCAB, key=slot, **kind))
        assert [buffers() for _ in range(3)] == expected
        assert buffers(3) == (kind is not PLAIN)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU to wait for")
def test_steps_by_slot_do_not_wait_for_the_device():
    rng = np.random.default_rng(12)
    slots = Slots(rng, VOCAB, device=DEVICE)
    rows = triton_slots.TritonSlotRows(slots.history)
    for _ in range(2):  # the first time compiles
        for slot in range(len(slots.history)):
            slots.come(slot, rows)
        batch, params, *_ = slots.step(3)
        logits = random_logits(rng, VOCAB, len(params.records)).to(DEVICE)
        torch.cuda.set_sync_debug_mode("error" if rows._plans else "default")
        try:
            rows.accept(*rows.draw(logits, batch), batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_missing_history_is_named():
    penalised = SamplingTable([pack(4, presence_penalty=1.0)])
    short = np.zeros((1, 3), np.int32)
    for params in (penalised.step([2]), penalised.step([4], short), penalised.step([2], short, [1])):
        with pytest.raises(ValueError, match=r"row [01]: "):
            triton_sampler.sample(torch.zeros(len(params.records), 4, device=DEVICE), params)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU to wait for")
def test_nothing_waits_for_the_device():
    rng = np.random.default_rng(9)
    rows = 16
    logits = random_logits(rng, VOCAB, rows).to(DEVICE)
    table = SamplingTable(random_batch(rng, VOCAB, rows))
    params = table.step([30] * rows, rng.integers(0, VOCAB, (rows, 60)).astype(np.int32))
    triton_sampler.sample(logits, params)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton_sampler.sample(logits, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_empty_batch_gives_nothing():
    tokens, logprobs = triton_sampler.sample(torch.empty(0, 10, device=DEVICE), SamplingTable([]).step([]))
    assert (tokens.shape, logprobs.shape) == ((0,), (0,))


class Launched:
    """A kernel as Triton has it, whose launches are recorded."""

    def __init__(self, direct=False):
        self.direct, self.launches = direct, []
        if direct:
            self.packed_metadata = ()
        else:
            self.compiled = []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.launches.append((grid, arguments))
            if not self.direct:
                assert options == triton_kernels.LAUNCH
                self.compiled.append(Launched(direct=True))
                return self.compiled[-1]
            return None

        return run


def test_a_launch_is_direct_when_triton_has_compiled_for_such_arguments():
    kernel, memory = Launched(), torch.zeros(64, dtype=torch.int32)
    aligned, other = memory[4:], memory[5:]
    calls = [(aligned, 32), (aligned, 48), (memory, 64)]  # alike
    calls += [(other, 32), (aligned, 33), (aligned, 1), (aligned, 1 << 32), (aligned.float(), 32)]
    for call in [*calls, *calls]:
        triton_launch.launch(kernel, 7, call, True)
    for constant in (False, False):
        triton_launch.launch(kernel, 7, (aligned, 32), constant)
    assert [arguments[1:] for _, arguments in kernel.launches] == [
        (32, True), (32, True), (33, True), (1, True), (1 << 32, True), (32, True), (32, False),
    ]  # fmt: skip
    assert [len(compiled.launches) for compiled in kernel.compiled] == [5, 1, 1, 1, 1, 1, 1]
    grid, arguments = kernel.compiled[0].launches[0]
    assert (grid, arguments[0] is aligned, arguments[1:]) == ((7, 1, 1), True, (48, True))


def ptx(capability, fusion="unfused"):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, "-c", COMPILE, str(capability), fusion]
    return subprocess.run(run, env=env, capture_output=True, check=True, timeout=300, text=True).stdout


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_compiled_kernel_rounds_every_operation_on_its_own(capability):
    found = ptx(capability)
    assert "fma" not in found
    arithmetic = set(re.findall(r"\s((?:add|sub|mul|div|mad|sqrt|rcp)[\w.]*\.f(?:32|64)\w*)", found))
    assert {"div.rn.f32", "mul.rn.f64"} <= arithmetic
    assert {op for op in arithmetic if not re.fullmatch(r"\w+\.rn\.f(32|32x2|64)", op)} == set()
    assert not re.findall(r"cvt\.[\w.]*(?:approx|ftz)[\w.]*", found)


def test_the_check_sees_fusion():
    assert "fma.rn" in ptx(90, "fused")
