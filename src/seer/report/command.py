"""`seer report`, and what `seer rollout --report-html` writes: from a log to files."""

from __future__ import annotations

from pathlib import Path

from seer.report.log_reader import read_timeline
from seer.report.timeline_page import page
from seer.report.trace import trace
from seer.report.view import RolloutView, choose_rollout
from seer.rollout.files import check_apart, check_writable, write_whole
from seer.sim_command.from_log import best_other


def write_reports(
    log: Path,
    *,
    html: Path | None,
    trace_file: Path | None = None,
    rollout_id: str = "",
    what_if: bool = False,
) -> str:
    """Write the files that are given; return a line about the rollout in them, and one on the engines' time.

    With `what_if` a line says how another policy would have done, if the log tells.

    Raises `InvalidField` for what is no log, for a rollout that it lacks, and for a file that cannot be
    written.
    """
    check_writable("--out", html)
    check_writable("--trace", trace_file)
    check_apart({"--out": html, "--trace": trace_file})
    timeline = read_timeline(log)
    view = RolloutView(timeline, choose_rollout(timeline, rollout_id))
    if html is not None:
        write_whole("--out", html, page(view).encode())
    if trace_file is not None:
        write_whole("--trace", trace_file, trace(view))
    figures = ", ".join(f"{value} {name}" for value, name in view.figures())
    lines = [f"rollout {view.rollout.rollout_id}: {figures}"]
    if view.lost is not None:
        parts = (f"{part.title} {share / 10:.1f} %" for part, share in view.lost.per_mille().items())
        lines.append(f"the engines' time: {', '.join(parts)}")
    if what_if and (other := best_other(timeline, view.rollout)):
        lines.append(other)
    return "\n".join(lines)
