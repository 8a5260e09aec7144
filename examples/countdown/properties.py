"""Judge whether a trained countdown model behaves like an RL workload.

Run as `python examples/countdown/properties.py [--model DIR] [--prompts FILE]`; prints one JSON
object and exits with 1 if a required property does not hold.

Invariants:
- drafts are replayed over sampled tokens: a step yields its accepted drafts and one more token,
  and sees nothing of the response past the tokens already out;
- every reference a draft comes from is a whole response other than the one being replayed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import task

GROUP = 16
CAP = 2000
DRAFT = 8
MATCH = 16
"""Longest context a draft looks up; longer ones hardly ever tell more."""
REPLAYED = 2
"""Responses per group whose drafting is replayed."""
REQUIRED: dict[str, tuple[float, float]] = {
    "groups_mixed": (0.6, 1.0),
    "pass_rate": (0.3, 0.7),
    "length_p99_over_p50": (8.0, math.inf),
    "between_prompt_share": (0.5, 1.0),
    "siblings_over_own_history": (1.5, math.inf),
}
"""Lowest and highest value of each property that a shipped model must have."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Engine settings unless the caller has set others. One thread: the layers are too small to share
out, and on busy cores threads that wait for each other made sampling some twenty times slower."""

Ids = Sequence[int]


def sample(model: Path, prompts: list[str], seed: int) -> list[list[Ids]]:
    """Sample `GROUP` responses per prompt at temperature 1, of `CAP` tokens at most, with vLLM.

    Returns token ids [prompt][response], without the prompt.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams  # reads the environment when imported

    engine = LLM(
        str(model), dtype="float32", enforce_eager=True, max_num_seqs=64, seed=seed,
        enable_prefix_caching=False,
    )  # fmt: skip
    params = SamplingParams(n=GROUP, temperature=1.0, max_tokens=CAP, detokenize=False)
    return [[o.token_ids for o in r.outputs] for r in engine.generate(prompts, params)]


def quantile(values: Iterable[float], q: float) -> float:
    """Nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def between_share(groups: list[list[float]]) -> float:
    """Share of the variance that lies between groups (one-way random effects, equal sizes)."""
    within = fmean(variance(g) for g in groups)
    between = max(0.0, variance([fmean(g) for g in groups]) - within / len(groups[0]))
    return between / (between + within)


def tokens_per_step(prompt: Ids, response: Ids, references: list[Ids]) -> float:
    """Replay a response drafting what last followed its longest suffix, in itself or a reference.

    Returns tokens gained per decoding step, from 1 (nothing accepted) to `DRAFT` + 1.
    """
    own = [*prompt, *response]
    texts: list[Ids] = [own, *([*prompt, *r] for r in references)]
    seen: dict[tuple[int, ...], tuple[int, int]] = {}

    def learn(text: int, end: int) -> None:
        for n in range(1, min(MATCH, end) + 1):
            seen[tuple(texts[text][end - n : end])] = (text, end)

    def draft(end: int) -> Ids:
        for n in range(min(MATCH, end), 0, -1):
            if (hit := seen.get(tuple(own[end - n : end]))) is not None:
                text, start = hit
                known = end if text == 0 else len(texts[text])
                return texts[text][start : min(start + DRAFT, known)]
        return ()

    for text in range(1, len(texts)):
        for end in range(1, len(texts[text])):
            learn(text, end)
    learned, at, steps = 1, len(prompt), 0
    while at < len(own):
        # What a step learns must end before the context: the context itself has no sequel yet.
        for end in range(learned, at):
            learn(0, end)
        learned = at
        accepted = 0
        for guess, token in zip(draft(at), own[at:], strict=False):
            if guess != token:
                break
            accepted += 1
        at, steps = at + accepted + 1, steps + 1
    return len(response) / steps


def drafting(prompts: list[Ids], groups: list[list[Ids]]) -> dict[str, float]:
    """Mean tokens a step with 0, 1, 5 and 15 finished siblings, and with another prompt's 15."""

    def mean(count: int, shift: int = 0) -> float:
        return fmean(
            tokens_per_step(prompt, groups[g][i], _others(groups[g - shift], i)[:count])
            for g, prompt in enumerate(prompts)
            for i in range(REPLAYED)
        )

    figures = {f"siblings_{count}": mean(count) for count in (0, 1, 5, 15)}
    return {**figures, "another_prompt_15": mean(15, shift=1)}


def _others(group: list[Ids], i: int) -> list[Ids]:
    return [*group[:i], *group[i + 1 :]]


def measure(problems: list[task.Problem], prompts: list[Ids], groups: list[list[Ids]]) -> dict[str, Any]:
    """All figures of a set of groups, the required ones by the names in `REQUIRED`."""
    rewards = [[task.check(p.prompt, text(r)) for r in g] for p, g in zip(problems, groups, strict=True)]
    lengths = [[len(r) for r in g] for g in groups]
    flat = [n for g in lengths for n in g]
    p50, p90, p99 = (quantile(flat, q) for q in (0.5, 0.9, 0.99))
    drafts = drafting(prompts, groups)
    counts = [len(problem.numbers) for problem in problems]
    return {
        "pass_rate": fmean(fmean(g) for g in rewards),
        "pass_rate_by_numbers": {
            n: fmean(fmean(g) for g, c in zip(rewards, counts, strict=True) if c == n)
            for n in sorted(set(counts))
        },
        "pass_at_group": fmean(any(g) for g in rewards),
        "groups_mixed": fmean(0 < sum(g) < len(g) for g in rewards),
        "finished_before_cap": fmean(n < CAP for n in flat),
        "length_mean": fmean(flat),
        "length_p50": p50,
        "length_p90": p90,
        "length_p99": p99,
        "length_p99_over_p50": p99 / p50,
        "length_max_over_mean_in_group": fmean(max(g) / fmean(g) for g in lengths),
        "between_prompt_share": between_share([[math.log(n) for n in g] for g in lengths]),
        "tokens_per_step": drafts,
        "siblings_over_own_history": drafts["siblings_15"] / drafts["siblings_0"],
    }


def text(response: Ids) -> str:
    """Return the words of a response; those of a larger vocabulary than `task.VOCAB` make no answer right."""
    return " ".join(task.VOCAB[token] if token < len(task.VOCAB) else task.UNK for token in response)


def judge(figures: dict[str, Any]) -> int:
    """Print figures and what is required of them; return the exit code."""
    required = {
        name: {"value": figures[name], "low": low, "high": high, "pass": low <= figures[name] <= high}
        for name, (low, high) in REQUIRED.items()
    }
    print(json.dumps({"figures": figures, "required": required}, indent=2))
    return 0 if all(row["pass"] for row in required.values()) else 1


def main() -> None:
    """Sample, measure, print, judge."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=here / "model")
    parser.add_argument("--prompts", type=Path, default=here / "prompts.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    ids = [[task.IDS[word] for word in prompt.split()] for prompt in prompts]
    groups = sample(args.model, prompts, args.seed)
    sys.exit(judge(measure([task.parse_prompt(prompt) for prompt in prompts], ids, groups)))


if __name__ == "__main__":
    main()
