"""What a run's metrics show: a line per iteration, a closing table, a picture.

Compare runs: `python examples/grpo/curves.py runs/grpo/seed-*/metrics.jsonl --out curves.png`; prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from checkpoint import write_whole
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot

Row = dict[str, Any]

PHASES = ("rollout", "train", "eval", "update")
PANELS = {
    "reward": "reward",
    "held_out": "held-out pass rate",
    "length_mean": "mean length",
    "tokens_per_second": "tokens/s",
    "tail_seconds": "tail, seconds",
    "kl": "KL from engines to trainer",
}
LINE = {
    "reward": "reward {reward:.3f}",
    "held_out": "held-out {held_out:.3f}",
    "length_mean": "length {length_mean:.0f}/{length_max}",
    "tokens_per_second": "{tokens_per_second:,.0f} tokens/s",
    "tail_seconds": "tail {tail_seconds:.1f} s",
}
"""What a row may have, and how a line shows it."""

EDGE = 5
"""Iterations at each end that the gain is measured between."""


def line(row: Row, iterations: int) -> str:
    """Return one iteration as a line of a log."""
    shown = "  ".join(text.format_map(row) for name, text in LINE.items() if name in row)
    seconds = "  ".join(f"{phase} {row['seconds'][phase]:.1f}" for phase in PHASES)
    return f"{row['iteration'] + 1:3d}/{iterations}  {shown}  {seconds} s  gap {row['gap']:.1e}"


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what a run comes to: means of all iterations, or [of the first, of the last] `edge` ones."""
    edge = max(1, min(EDGE, len(rows) // 2))

    def mean(name: str, some: Sequence[Row] = rows) -> float:
        return statistics.mean(row[name] for row in some)

    ends = ("held_out", "reward", "mixed_groups", "length_mean")
    means = ("tokens_per_second", "tail_seconds", "reward_seconds", "reward_overlap", "gap")
    return {
        "iterations": len(rows),
        "edge": edge,
        **{name: [mean(name, rows[:edge]), mean(name, rows[-edge:])] for name in ends if name in rows[0]},
        **{name: mean(name) for name in means if name in rows[0]},
        "seconds": {phase: statistics.mean(row["seconds"][phase] for row in rows) for phase in PHASES},
        "total_seconds": sum(sum(row["seconds"].values()) for row in rows),
    }


def write_metrics(rows: Sequence[Row], folder: Path) -> None:
    """Write a line of JSON for each iteration."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_whole(folder / "metrics.jsonl", lambda file: file.write(text.encode()))


def report(rows: Sequence[Row], picture: Path, more: Mapping[str, str] | None = None) -> None:
    """Print the figures as a table, with `more` rows, and draw the picture."""
    run = figures(rows)
    table = Table(title=f"{run['iterations']} iterations: first {run['edge']} → last {run['edge']}")
    table.show_header = False
    for name in ("held_out", "reward", "mixed_groups"):
        table.add_row(name.replace("_", " "), "{:.3f} → {:.3f}".format(*run[name]))
    if "length_mean" in run:
        table.add_row("mean length", "{:.0f} → {:.0f}".format(*run["length_mean"]))
        table.add_row("tokens/s, tail", f"{run['tokens_per_second']:,.0f}, {run['tail_seconds']:.1f} s")
    seconds = ", ".join(f"{phase} {value:.2f}" for phase, value in run["seconds"].items())
    table.add_row("seconds an iteration", seconds)
    if "reward_seconds" in run:
        hidden = f"{run['reward_overlap']:.0%} of {run['reward_seconds']:.2f} s"
        table.add_row("rewards hidden by the rollout", hidden)
    table.add_row("trainer's logprobs off the engines'", f"{run['gap']:.1e} on average")
    for row in (more or {}).items():
        table.add_row(*row)
    Console().print(table)
    draw({"": rows}, picture)
    print(f"metrics: {picture.parent / 'metrics.jsonl'}   picture: {picture}")


def draw(runs: Mapping[str, Sequence[Row]], picture: Path) -> None:
    """Draw the curves of one or several runs, named by their keys, into a PNG."""
    label, rows = next(iter(runs.items()))
    panels = [name for name in PANELS if name in rows[0]]
    width = len(panels) // 2 + 1  # shares of time are a panel, too
    figure, axes = pyplot.subplots(2, width, figsize=(4 * width, 6), layout="constrained")
    for axis, name in zip(axes.flat, panels, strict=False):
        for run, some in runs.items():
            axis.plot([row["iteration"] + 1 for row in some], [row[name] for row in some], label=run, lw=1.3)
        axis.set(title=PANELS[name], ylim=(0, 1) if name in ("reward", "held_out") else (0, None))
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) : -1]:
        axis.remove()
    for axis in figure.axes:
        axis.xaxis.get_major_locator().set_params(integer=True)
    if len(runs) > 1:
        axes.flat[0].legend()
    shares = [[row["seconds"][phase] / sum(row["seconds"].values()) for row in rows] for phase in PHASES]
    last = axes.flat[-1]
    last.stackplot([row["iteration"] + 1 for row in rows], shares, labels=PHASES, alpha=0.8)
    last.set(title=f"shares of time {label}".strip(), ylim=(0, 1), xlabel="iteration")
    last.legend(loc="lower right", fontsize="small")
    figure.savefig(picture, dpi=80)
    pyplot.close(figure)


def main() -> None:
    """Draw several runs in one picture; each is named by its folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs = {
        path.resolve().parent.name: [json.loads(text) for text in path.read_text().splitlines()]
        for path in args.metrics
    }
    draw(runs, args.out)
    print(json.dumps({name: figures(rows) for name, rows in runs.items()}, indent=1))


if __name__ == "__main__":
    main()
