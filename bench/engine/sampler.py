"""Time the sampler against its peers on one core, or on a GPU; print JSON.

    python bench/engine/sampler.py [--repeats 31] [--device cuda [--dtype bfloat16]]

Microseconds per row, medians over the repeats: of CPU time, or on a GPU of the time from one wait for
the device to the next, launches included (`seer` is the Triton kernel there, `seer_torch` what it
replaces). Rows are synthetic: `diffuse` is normal with sigma 3, `peaked` has one token at 95 % or more.
Peers, in the same run on the same rows: torch's log_softmax alone; torch's softmax, exponential noise and
argmax, the draw alone of most samplers; where vLLM is installed, its own sampler at temperature 1 with the
sampled token's logprob, and a copy of the logits since it overwrites them; on CPUs a draw by numpy's Philox
and Gumbel, without logprob.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # vLLM compiles a helper for 20 s otherwise

import numpy as np
import torch
from lib.hardware import machine

try:
    import vllm
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
except ModuleNotFoundError:  # a machine for kernels alone
    vllm = None

from seer import _native
from seer.common.types import SamplingParams
from seer.services.engine.vllm.sampling import torch_sampler
from seer.services.engine.vllm.sampling.rows import RequestSampling, SamplingTable
from seer.services.engine.vllm.sampling.sampler import sample_rows
from seer.services.engine.vllm.sampling.torch_sampler import SampleFunction

INNER_TOKENS = 200_000  # draws this small are repeated inside one measurement
ROWS = {66: (32,), 32_768: (8,), 151_936: (8,)}
GPU_ROWS = {66: (128,), 32_768: (1, 128, 1024), 151_936: (1, 32, 132, 256, 1024, 4096)}
TORCH_ROWS = 128
"""More rows than these are too many for `seer_torch`, which holds several float32 copies of the logits."""

OPTIONS = {
    "plain": {},
    "temperature_0.8": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "top_p_0.95": {"top_p": 0.95},
    "top_k_50": {"top_k": 50},
}


def logits_of(kind: str, rows: int, vocab: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * (
        3.0 if kind == "diffuse" else 2.0
    )
    if kind == "peaked":
        top = x.logsumexp(-1) + 3.0
        x[torch.arange(rows), torch.arange(rows) * 7 % vocab] = top
    return x.to(device, dtype)


def seer_draw(logits: torch.Tensor, fields: dict[str, float], sample: SampleFunction) -> Callable[[], object]:
    rows, vocab = logits.shape
    params = SamplingParams(max_tokens=1024, **fields)
    table = SamplingTable(
        [RequestSampling.pack(params, key=k, prompt_len=1, stop_ids=(), vocab=vocab) for k in range(rows)]
    )
    positions = np.full(rows, 100)

    def draw() -> object:
        positions[:] += 1
        return sample(logits, table.step(positions))

    return draw


def vllm_draw(logits: torch.Tensor, top_p: float | None, top_k: int | None) -> Callable[[], object]:
    rows = len(logits)
    ones, none = torch.ones(rows, device=logits.device), torch.zeros(rows, device=logits.device)
    metadata = SamplingMetadata(
        temperature=ones, all_greedy=False, all_random=True,
        top_p=None if top_p is None else ones * top_p,
        top_k=None if top_k is None else (ones * top_k).int(),
        generators={}, max_num_logprobs=0, no_penalties=True, prompt_token_ids=None,
        frequency_penalties=none, presence_penalties=none, repetition_penalties=ones,
        output_token_ids=[[] for _ in range(rows)], allowed_token_ids_mask=None, bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    sampler = Sampler()
    return lambda: sampler(logits.clone(), metadata)  # it works in place


def torch_draw(logits: torch.Tensor) -> Callable[[], object]:
    def draw() -> object:
        probabilities = logits.softmax(-1)
        return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(-1)

    return draw


def numpy_draw(logits: torch.Tensor) -> Callable[[], object]:
    x = logits.numpy()

    def draw() -> object:
        for row, line in enumerate(x):
            noise = np.random.Generator(np.random.Philox(key=row, counter=100)).gumbel(size=line.size)
            (line + noise).argmax()
        return None

    return draw


def microseconds(draw: Callable[[], object], logits: torch.Tensor, repeats: int) -> float:
    rows, vocab = logits.shape
    inner = max(1, INNER_TOKENS // (rows * vocab))
    draw()
    now = gpu_time_ns if logits.is_cuda else time.process_time_ns
    times = []
    for _ in range(repeats):
        start = now()
        for _ in range(inner):
            draw()
        times.append((now() - start) / 1000 / inner / rows)
    return round(statistics.median(times), 2)


def gpu_time_ns() -> int:
    torch.cuda.synchronize()
    return time.perf_counter_ns()


def measure(
    vocab: int, rows: int, kind: str, device: str, dtype: torch.dtype, repeats: int
) -> dict[str, object]:
    x = logits_of(kind, rows, vocab, device, dtype)
    samplers = {"seer": sample_rows}  # as the engine calls it
    if device != "cpu" and rows <= TORCH_ROWS:
        samplers["seer_torch"] = torch_sampler.sample
    line: dict[str, object] = {"vocab": vocab, "rows": rows, "kind": kind}
    for name, sample in samplers.items():
        line[name] = {
            option: microseconds(seer_draw(x, fields, sample), x, repeats)
            for option, fields in OPTIONS.items()
        }
    line["torch_log_softmax"] = microseconds(lambda: x.log_softmax(-1), x, repeats)
    line["torch_draw"] = microseconds(torch_draw(x), x, repeats)
    if vllm is not None:
        line["vllm_sampler"] = {
            "plain": microseconds(vllm_draw(x, None, None), x, repeats),
            "top_p_0.95": microseconds(vllm_draw(x, 0.95, None), x, repeats),
            "top_k_50": microseconds(vllm_draw(x, None, 50), x, repeats),
        }
    if device == "cpu":
        line["numpy_philox_gumbel"] = microseconds(numpy_draw(x), x, repeats)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(1)
    results = [
        measure(vocab, rows, kind, device, getattr(torch, arguments.dtype), arguments.repeats)
        for vocab, counts in (GPU_ROWS if device == "cuda" else ROWS).items()
        for rows in counts
        for kind in ("peaked", "diffuse")
    ]
    on = {"instruction_set": _native.INSTRUCTION_SET, "cores": 1}
    if device == "cuda":
        on = {"gpu": torch.cuda.get_device_name()}
    report = {
        "machine": machine("torch", "vllm", "numpy"),
        "ran_on": on,
        "dtype": arguments.dtype,
        "unit": f"microseconds of {'CPU' if device == 'cpu' else 'wall'} time per row, median",
        "results": results,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
