"""What each command of `on_gpu.py` says in a line, from the figures of its pieces.

Invariants:
- `pass` only if all that the verdict is about was measured and is as it should be; `short` if it was measured
  and is not; `incomplete` if something is missing, with what there is;
- what a system refuses is no failure of the run: it is named, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Found = dict[str, Any]
"""Figures by piece; a piece that wrote none is missing."""

Verdict = tuple[str, str]
"""`pass`, `short` or `incomplete`, and the line."""

GATE_US = 100
"""Microseconds that a gate may cost beyond the work behind it: drafts take 100 to 400."""

LEAST = 0.98
"""Of bare vLLM's tokens/s, in every cell."""

WITH_DRAFTS = {"512x64": 1.3, "512x1": 2.0}
"""At least so many times bare vLLM's tokens/s with drafts; other cells: `LEAST`."""

DRAFTED = ("own", "grouped", "grouped-now")


def gate(found: Found) -> Verdict:
    """Say which gate is cheaper; a run ends only if gates open at their deadlines."""
    cells = found.get("gate", {}).get("cells", {})
    worst = {
        kind: max(cell["beyond_us"] for name, cell in cells.items() if name.split()[0] == kind)
        for kind in dict.fromkeys(name.split()[0] for name in cells)
    }
    gates = {kind: worst[kind] for kind in ("function", "flag") if kind in worst}
    if len(gates) < 2 or "deadline" not in worst:
        return "incomplete", f"gates measured: {', '.join(worst) or 'none'}"
    best = min(gates, key=lambda kind: gates[kind])
    line = f"{best} is cheaper: " + ", ".join(
        f"{kind} {us:g} us beyond its work" for kind, us in gates.items()
    )
    return "pass" if gates[
        best
    ] <= GATE_US else "short", f"{line}; a stalled host's gate opened at its deadline"


def ratios(rates: dict[str, Any], sides: Callable[[str], bool]) -> dict[str, dict[str, float]]:
    """Return the medians of ratios to bare vLLM by cell and side, of the sides chosen."""
    return {
        cell: {
            side: entry["ratio"][0]
            for side, entry in entries.items()
            if sides(side) and side != rates["reference"] and "ratio" in entry
        }
        for cell, entries in rates.get("cells", {}).items()
    }


def refused(rates: dict[str, Any]) -> str:
    """Return a clause about the sides that did not start."""
    found = [f"{side} refused" for side, about in rates.get("sides", {}).items() if "refused" in about]
    return "; " + ", ".join(found) if found else ""


def split(found: Found) -> Verdict:
    """Say how all sides without drafts compare in one cell, and the best of Seer's in each."""
    rates = found.get("rates", {})
    cells = ratios(rates, lambda side: side not in DRAFTED)
    own = ratios(rates, lambda side: not side.startswith("vllm") and side not in DRAFTED)
    if not cells or not all(own.values()):
        return "incomplete", f"{len(cells)} cells, not all with one of Seer's sides{refused(rates)}"
    best = {cell: max(sides.values()) for cell, sides in own.items()}
    shown = "512x64" if "512x64" in cells else next(reversed(cells))
    line = f"{shown}: " + ", ".join(f"{side} {each:.2f}" for side, each in cells[shown].items())
    line += (
        "; best of Seer " + ", ".join(f"{cell} {each:.2f}" for cell, each in best.items()) + refused(rates)
    )
    if rates["skipped"] or "profile" not in found:
        return "incomplete", line
    return "pass" if min(best.values()) >= LEAST else "short", line


def steps_of(doctor: dict[str, Any]) -> dict[tuple[int, int], float]:
    """Return the milliseconds of a step by requests and drafts, from a report of `seer doctor`."""
    lines = [line["figures"] for line in doctor.get("lines", []) if line["text"] == "step"]
    return {(each["batch"], each["drafts"]): each["ms"] for each in lines}


def graphs(found: Found) -> Verdict:
    """Say which kind of graphs is the fastest, without drafts and with most of them.

    It is as it should be if one that drafts is, in both, also beside the engine that never drafts.
    """
    tables = {name: steps_of(report) for name, report in found.items() if "lines" in report}
    lost = [name for name, steps in tables.items() if not steps]
    tables = {name: steps for name, steps in tables.items() if steps}
    if not tables:
        return "incomplete", "no kind of graphs has a table of steps"
    rows = max(set.intersection(*({batch for batch, _ in each if batch <= 64} for each in tables.values())))
    most = max(drafts for steps in tables.values() for batch, drafts in steps if batch == rows)
    times = {
        drafts: {name: steps[rows, drafts] for name, steps in tables.items() if (rows, drafts) in steps}
        for drafts in (0, most)
    }
    parts = [
        f"{drafts} drafts: "
        + ", ".join(f"{name} {ms:g} ms" for name, ms in sorted(each.items(), key=lambda e: e[1]))
        for drafts, each in times.items()
    ]
    line = f"{rows} rows, " + "; ".join(parts)
    if lost:
        return "incomplete", f"{line}; no steps of {', '.join(lost)}"
    good = [
        name
        for name in times[most]
        if all(each[name] <= min(each.values()) / LEAST for each in times.values())
    ]
    return "pass" if good else "short", line


def verify(found: Found) -> Verdict:
    """Say whether tokens are the same, and every bit with batch-invariant kernels."""
    runs = {name: each for name, each in found.items() if name.startswith("verify")}
    bugs = sum(each["bug"] for each in runs.values())
    failed = [name for name, each in runs.items() if not each["passed"]]
    exact = [name for name in found if name.endswith("invariant")]
    differing = sum(found[name]["numeric"] for name in exact if name in runs)
    rows = sum(way["differ"] for name in exact if name not in runs for way in found[name]["ways"].values())
    compared = sum(each["tokens_compared"] for each in runs.values())
    line = f"{bugs} bugs in {compared} tokens"
    if exact:
        line += f"; batch-invariant: {differing} numeric differences, {rows} rows of logits differ"
    if failed:
        line += f"; did not pass: {', '.join(failed)}"
    if not runs:
        return "incomplete", line
    return "pass" if not (bugs or failed or differing or rows) else "short", line


def drafts(found: Found) -> Verdict:
    """Say what drafts gain over bare vLLM, in every cell."""
    rates = found.get("rates", {})
    cells = ratios(rates, lambda side: side in DRAFTED)
    if not cells or not all(cells.values()):
        return "incomplete", f"{len(cells)} cells, not all with drafts{refused(rates)}"
    best = {cell: max(sides.values()) for cell, sides in cells.items()}
    line = (
        "best with drafts: " + ", ".join(f"{cell} {each:.2f}" for cell, each in best.items()) + refused(rates)
    )
    if rates["skipped"]:
        return "incomplete", line
    enough = all(each >= WITH_DRAFTS.get(cell, LEAST) for cell, each in best.items())
    return "pass" if enough else "short", line


def brief(found: Found) -> Verdict:
    """Say what `verify`, `split` and `drafts` say of what there is."""
    each = [verify(found), split(found | {"profile": {}}), drafts(found)]
    worst = max((status for status, _ in each), key=["pass", "short", "incomplete"].index)
    return worst, "; ".join(line for _, line in each)
