"""Draw the rewards of an undisturbed run, and below them those of runs under faults, which are the same.

    python bench/correctness/same_weights.py --out runs/same-weights --plans 2 --iterations 10 --faults 12
    python bench/correctness/same_curve.py runs/same-weights docs/same-weights.svg

A line for each run; a run under faults has a mark for each fault, at the step that was under way: a cross for
a kill, a bar for a stop, a square for a node that was cut off. The lines are set apart, or one would hide the
others.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")  # no display is needed
from matplotlib import pyplot

APART = 0.12
"""Of reward, from line to line."""

MARKS = {
    "kill": ("x", "#c0392b", "kill of a process"),
    "stop": ("|", "#b9770e", "stop of a process"),
    "cut": ("s", "#7d3c98", "node cut off"),
}


def draw(runs: dict[str, dict[str, Any]], picture: Path) -> None:
    """Draw runs by name, the undisturbed one first, as an SVG: the same file from the same runs."""
    matplotlib.rcParams |= {"svg.hashsalt": "seer", "svg.fonttype": "none"}
    figure, axis = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    for place, (name, run) in enumerate(runs.items()):
        steps = range(1, len(run["rewards"]) + 1)
        line = [reward - APART * place for reward in run["rewards"]]
        axis.plot(steps, line, marker=".", lw=1.3, label=f"{name}: checkpoint {run['digests'][-1][:8]}")
        places = list(zip(_spread(run["at_steps"]), run["faults"], strict=True))
        for what, (mark, color, _) in MARKS.items():
            at = [x for x, fault in places if fault.startswith(what)]
            axis.plot(at, [_height(line, x) for x in at], mark, color=color, ms=7, mew=1.6, ls="none")
    seen = {fault.partition(" ")[0] for run in runs.values() for fault in run["faults"]}
    for mark, color, label in (MARKS[what] for what in MARKS if what in seen):
        axis.plot([], [], mark, color=color, ls="none", label=label)
    axis.set(xlabel="step", ylabel=f"reward; each line lower by {APART:g}")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)


def _spread(steps: list[int]) -> list[float]:
    """Return where marks stand: those of one step side by side, before the step's own point."""
    counts, seen, found = Counter(steps), Counter[int](), []
    for step in steps:
        seen[step] += 1
        found.append(step + seen[step] / (counts[step] + 1))
    return found


def _height(line: list[float], x: float) -> float:
    """Return a line's height at a place between its points, the first of which is at 1."""
    left = min(max(int(x) - 1, 0), len(line) - 1)
    right = min(left + 1, len(line) - 1)
    share = max(0.0, x - 1 - left)
    return line[left] + share * (line[right] - line[left])


def main() -> None:
    """Draw what the command line names; prints what the picture shows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what same_weights.py was given as --out")
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    files = sorted(args.folder.glob("plan-*/run.json"))
    runs = {"undisturbed": json.loads((args.folder / "quiet" / "run.json").read_text())}
    runs |= {f"plan {file.parent.name[5:]}": json.loads(file.read_text()) for file in files}
    draw(runs, args.picture)
    print(
        json.dumps(
            {name: {"faults": len(run["faults"]), "rewards": run["rewards"]} for name, run in runs.items()}
        )
    )


if __name__ == "__main__":
    main()
