"""`make demo`: the main job on the shipped prompts and model, then a table of what came out.

Starts four kinds of processes (buffer, context, dgds and two vLLM engines) on this machine, asks for eight
responses a prompt, and checks every answer with the task's own checker.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from task import check

HERE = Path(__file__).parent
RUN = Path("runs/demo")
RESPONSES = 8
MAX_TOKENS = 1024


def main() -> int:
    """Run the rollout and print its summary; returns the exit code."""
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    out, report_path = RUN / "responses.jsonl", RUN / "report.json"
    command = [sys.executable, "-m", "seer.cli.main", "rollout", str(HERE / "prompts.jsonl")]
    command += ["--model", str(HERE / "model"), "--out", str(out), "--report", str(report_path)]
    command += ["-n", str(RESPONSES), "--max-tokens", str(MAX_TOKENS)]
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        prompts = [json.loads(line)["prompt"] for line in (HERE / "prompts.jsonl").read_text().splitlines()]
        groups = [json.loads(line)["responses"] for line in out.read_text().splitlines()]
        Console().print(summary(prompts, groups, json.loads(report_path.read_text())))
        print(f"responses: {out}   report: {report_path}")
    return code


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


def summary(prompts: list[str], groups: list[list[dict[str, object]]], report: dict[str, Any]) -> Table:
    """Return the closing table: speed, tail, lengths, pass rate by the task's checker."""
    pairs = [(prompt, response) for prompt, group in zip(prompts, groups, strict=True) for response in group]
    lengths = sorted(len(list(response["token_ids"])) for _, response in pairs)  # type: ignore[call-overload]
    passed = [check(prompt, str(response["text"])) for prompt, response in pairs]
    mixed = sum(0 < sum(passed[i : i + RESPONSES]) < RESPONSES for i in range(0, len(passed), RESPONSES))
    p99 = lengths[int(0.99 * (len(lengths) - 1))]
    table = Table(title="Seer demo: countdown", show_header=False)
    for name, value in (
        ("responses", f"{len(pairs)} to {len(prompts)} prompts"),
        ("tokens", f"{report['tokens']:,} in {report['seconds']:.1f} s"),
        ("tokens/s", f"{report['tokens_per_second']:,.0f}"),
        ("tail (last 10 % of requests)", f"{report['tail_seconds']:.1f} s"),
        ("length p50 / p99 / max", f"{statistics.median(lengths):.0f} / {p99} / {lengths[-1]}"),
        ("chunks / migrations", f"{report['chunks']} / {report['migrations']}"),
        ("acceptance length / tokens per step", _drafts(report["instances"])),
        ("prompt tokens from pool / own cache", _cached(report["instances"])),
        ("preemptions", f"{report['preemptions']}"),
        ("pass rate", f"{statistics.mean(passed):.2f}"),
        ("groups with mixed rewards", f"{mixed} of {len(groups)}"),
    ):
        table.add_row(name, value)
    return table


if __name__ == "__main__":
    sys.exit(main())
