"""Plots of one simulated rollout: completion of all policies, instances over time, the tail.

Imported only when needed: requires matplotlib, the extra `plot`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from seer.sim.cluster import Outcome
from seer.sim.study import CURVE, Run
from seer.sim.workload import Workload

_DPI = 120
_COLOURS = mpl.color_sequences["tab10"]


def draw(load: Workload, runs: Sequence[Run], folder: Path) -> list[Path]:
    """Plot the runs of one seed into a folder; return the files. Instances are plotted of runs with a
    trace.
    """
    traced = [(run.variant.label, run.trace) for run in runs if run.trace is not None]
    figures = {
        "completion": _completion(load, runs),
        "instances": _instances(load, traced),
        "tail": _tails(load, traced),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{Path(load.name).stem}-{name}.png")
        figure.savefig(paths[-1], dpi=_DPI)
    return paths


def _completion(load: Workload, runs: Sequence[Run]) -> Figure:
    """Plot the share of responses that have ended over time, for every variant."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    colours = {
        name: _COLOURS[index % len(_COLOURS)]
        for index, name in enumerate(dict.fromkeys(run.variant.policy for run in runs))
    }
    for run in runs:
        style = "--" if run.variant.drafts else "-"
        label = f"{run.variant.label}, {run.total:.0f} s"
        share = [100 * part / CURVE for part in range(CURVE + 1)]
        axes.plot(run.curve, share, style, color=colours[run.variant.policy], label=label)
    for drafts in sorted({run.variant.drafts for run in runs}):
        bound = next(run.bound for run in runs if run.variant.drafts == drafts)
        label = f"bound{' + drafts' if drafts else ''}, {bound:.0f} s"
        axes.axvline(bound, linestyle="-." if drafts else ":", color="black", label=label)
    axes.axhline(90, linewidth=0.5, color="grey")
    axes.set(xlabel="seconds", ylabel="responses ended, %", title=load.name, ylim=(0, 101))
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", fontsize=8)
    return figure


def _instances(load: Workload, traced: Sequence[tuple[str, Outcome]]) -> Figure:
    """Plot KV in use and running requests: thin lines for instances, a thick one for their mean."""
    figure = Figure(figsize=(6 * len(traced), 6), layout="constrained")
    axes = figure.subplots(2, len(traced), sharex=True, sharey="row", squeeze=False)
    for column, (label, outcome) in enumerate(traced):
        times = [sample.time for sample in outcome.samples]
        shares = [[100 * share for share in sample.kv_share] for sample in outcome.samples]
        _lines(axes[0, column], times, shares)
        _lines(axes[1, column], times, [sample.running for sample in outcome.samples])
        axes[0, column].set_title(f"{load.name}, {label}: {outcome.total:.0f} s")
        axes[1, column].set_xlabel("seconds")
        for row in (0, 1):
            axes[row, column].axvline(outcome.total - outcome.tail, linestyle=":", color="black")
    axes[0, 0].set_ylabel("KV in use, %")
    axes[1, 0].set_ylabel("requests running")
    axes[0, 0].set_ylim(0, 101)
    axes[1, 0].set_ylim(bottom=0)
    axes[0, 0].set_xlim(left=0)
    return figure


def _lines(axes: Axes, times: Sequence[float], by_time: Sequence[Sequence[float]]) -> None:
    for values in zip(*by_time, strict=True):
        axes.plot(times, values, linewidth=0.5, alpha=0.4, color=_COLOURS[0])
    means = [sum(values) / len(values) for values in by_time]
    axes.plot(times, means, linewidth=2, color=_COLOURS[3])


def _tails(load: Workload, traced: Sequence[tuple[str, Outcome]]) -> Figure:
    """Plot when the last tenth of the responses ran: one line per response, one colour per instance."""
    figure = Figure(figsize=(6 * len(traced), 6), layout="constrained")
    axes = figure.subplots(1, len(traced), sharex=True, squeeze=False)
    for column, (label, outcome) in enumerate(traced):
        ends: dict[str, float] = {}
        for request_id, _, _, end in outcome.spans:
            ends[request_id] = max(end, ends.get(request_id, 0.0))
        last = sorted(ends, key=ends.__getitem__)[math.ceil(0.9 * len(ends)) :]
        rows = {request_id: row for row, request_id in enumerate(last)}
        spans = [span for span in outcome.spans if span[0] in rows]
        names = {name: index for index, name in enumerate(sorted({span[1] for span in outcome.spans}))}
        ax = axes[0, column]
        ax.add_collection(
            LineCollection(
                [[(start, rows[request_id]), (end, rows[request_id])] for request_id, _, start, end in spans],
                colors=[_COLOURS[names[name] % len(_COLOURS)] for _, name, _, _ in spans],
                linewidths=min(6.0, max(0.5, 300 / max(len(rows), 1))),
            )
        )
        ax.axvline(outcome.total - outcome.tail, linestyle=":", color="black")
        ax.set(
            xlabel="seconds", title=f"{load.name}, {label}: tail {outcome.tail:.0f} s", ylim=(-1, len(rows))
        )
        ax.set_xlim(0, max(other.total for _, other in traced))
    axes[0, 0].set_ylabel("last 10 % of the responses, by their end")
    return figure
