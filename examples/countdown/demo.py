"""`make demo`: the main job on the shipped prompts and model, then a table of what came out.

Starts four kinds of processes (buffer, context, dgds and two vLLM engines) on this machine, asks for eight
responses a prompt, and checks every answer with the task's own checker. The engines have little memory for
KV, so the schedule matters. With `--beside vllm`, plain vLLM does the same afterwards.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from task import Problem, check

HERE = Path(__file__).parent
ENGINES = 2
RESPONSES = 8
MAX_TOKENS = 1024
LITTLE_KV = ("engine.kv_blocks=176", "engine.max_num_seqs=32", "pool.pull_tokens=32")
"""KV for about 14 of these responses an engine: vLLM alone preempts each about once (bench/scheduling)."""

ROLLOUT_NUMBER = 1962831785
"""What releases before BLAKE3 took from the model's digest: the tokens stay those that are recorded."""

Group = list[dict[str, Any]]
"""Responses to a prompt, as `seer rollout` writes them."""


def main() -> int:
    """Run the rollout and print its summary; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", choices=["vllm"], help="what else does the same, for comparison")
    beside, run = parser.parse_args().beside, Path("runs/demo")
    code = rollout(HERE, run, settings=LITTLE_KV, number=ROLLOUT_NUMBER)
    if code:
        return code
    if not beside:
        print_summary("countdown", HERE, run)
        return 0
    from beside_vllm import beside_vllm

    print(f"now {ENGINES} engines of plain vLLM, on the same cores with the same KV memory", flush=True)
    vllm = beside_vllm(HERE, run, ENGINES, LITTLE_KV, responses=RESPONSES, max_tokens=MAX_TOKENS)
    print_summary("countdown", HERE, run, vllm=vllm)
    return 0


def rollout(
    example: Path,
    run: Path,
    *,
    responses: int = RESPONSES,
    max_tokens: int = MAX_TOKENS,
    settings: Sequence[str] = (),
    number: int | None = None,
) -> int:
    """Run the prompts in a folder on the model in it, and write what comes out into `run`."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    command = [sys.executable, "-m", "seer.cli.main", "rollout", str(example / "prompts.jsonl")]
    command += ["--model", str(example / "model"), "-n", str(responses), "--max-tokens", str(max_tokens)]
    command += ["--out", str(run / "responses.jsonl"), "--report", str(run / "report.json")]
    command += ["--report-html", str(run / "report.html"), "--instances", str(ENGINES)]
    command += [] if number is None else ["--rollout-number", str(number)]
    command += [part for setting in settings for part in ("--set", setting)]
    return subprocess.run(command, check=False).returncode


def results(example: Path, run: Path) -> tuple[list[Problem], list[Group]]:
    """Return the problems, and the responses to each."""
    rows = [json.loads(line) for line in (example / "prompts.jsonl").read_text().splitlines()]
    groups = [json.loads(line)["responses"] for line in (run / "responses.jsonl").read_text().splitlines()]
    return [Problem(tuple(row["numbers"]), row["target"]) for row in rows], groups


def print_summary(
    title: str,
    example: Path,
    run: Path,
    more: Mapping[str, str] | None = None,
    vllm: dict[str, Any] | None = None,
) -> None:
    """Print the closing table, with `more` rows of it and what plain `vllm` took, and where the files are."""
    report = json.loads((run / "report.json").read_text())
    table = summary(title, *results(example, run), report, vllm)
    for row in (more or {}).items():
        table.add_row(*row)
    Console().print(table)
    if vllm:
        ratio = report["tokens_per_second"] / vllm["tokens_per_second"]
        print(f"Seer made {ratio:.2f} times as many tokens a second as plain vLLM, in one run of each, one")
        print("after the other. The ratio differs from run to run, and with what else this machine does.")
    print(f"responses: {run / 'responses.jsonl'}   figures: {run / 'report.json'}")
    print(f"what ran when and where: open {run / 'report.html'} in a browser")


def _totals(instances: list[dict[str, dict[str, int]]]) -> Counter[str]:
    totals = Counter[str]()
    for instance in instances:
        totals.update(instance["stats"])
    return totals


def _drafts(instances: list[dict[str, dict[str, int]]]) -> str:
    """Return how many tokens a step brings to one request, and to all that run together."""
    totals = _totals(instances)
    if not totals["verifications"]:
        return "no drafts"
    tokens = totals["generated_tokens"]
    return f"{tokens / totals['verifications']:.2f} / {tokens / max(totals['steps'], 1):.1f}"


def _cached(instances: list[dict[str, dict[str, int]]]) -> str:
    """Return which shares of all chunks' prompts, with what they had generated, were not computed."""
    totals = _totals(instances)
    whole = max(totals["prompt_tokens"], 1)
    own = totals["cached_tokens"] - totals["pool_tokens"]
    return f"{totals['pool_tokens'] / whole:.1%} / {own / whole:.1%}"


def _speed(figures: dict[str, Any], lengths: Sequence[int]) -> dict[str, str]:
    """Return the rows that do not depend on how the tokens were made."""
    p99 = lengths[int(0.99 * (len(lengths) - 1))]
    return {
        "tokens": f"{figures['tokens']:,} in {figures['seconds']:.1f} s",
        "tokens/s": f"{figures['tokens_per_second']:,.0f}",
        "tail (last 10 % of requests)": f"{figures['tail_seconds']:.1f} s",
        "length p50 / p99 / max": f"{statistics.median(lengths):.0f} / {p99} / {lengths[-1]}",
        "preemptions": f"{figures['preemptions']}",
    }


def summary(
    title: str,
    problems: list[Problem],
    groups: list[Group],
    report: dict[str, Any],
    vllm: dict[str, Any] | None = None,
) -> Table:
    """Return the closing table: speed, tail, lengths, pass rate by the task's checker."""
    pairs = [
        (problem, response) for problem, group in zip(problems, groups, strict=True) for response in group
    ]
    passed = [check(problem.prompt, response["text"]) for problem, response in pairs]
    mixed = sum(0 < sum(passed[i : i + RESPONSES]) < RESPONSES for i in range(0, len(passed), RESPONSES))
    rows = {
        "responses": f"{len(pairs)} to {len(problems)} prompts",
        **_speed(report, sorted(len(response["token_ids"]) for _, response in pairs)),
        "chunks / moves between engines": f"{report['chunks']} / {report['migrations']}",
        "acceptance length / tokens per step": _drafts(report["instances"]),
        "prompt tokens from pool / own cache": _cached(report["instances"]),
        "pass rate": f"{statistics.mean(passed):.2f}",
        "groups with mixed rewards": f"{mixed} of {len(groups)}",
    }
    table = Table("", "Seer", title=f"Seer demo: {title}", show_header=vllm is not None)
    if vllm:
        table.add_column("plain vLLM")
    theirs = _speed(vllm, vllm["lengths"]) if vllm else {}
    for name, value in rows.items():
        table.add_row(name, value, *([theirs.get(name, "")] if vllm else []))
    return table


if __name__ == "__main__":
    sys.exit(main())
