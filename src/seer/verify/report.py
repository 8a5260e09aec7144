"""What `seer verify` found: for people as a table, for scripts as JSON.

Invariants:
- it passes only if no cell broke or has a bug, every cell that was asked for by name did what it is
  there for, at least one cell did, and enough was compared;
- arithmetic excuses nothing where engines say that their kernels are batch-invariant: a cell with as many
  ranks as the reference has every bit of its tokens and logprobs;
- a cell of the whole matrix that this workload could not exercise is left out with its reason: its
  tokens count if they differ, and prove nothing if they do not;
- whatever keeps it from passing is said in words (`failures`), and so is what was left out (`left_out`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from seer.common.types import SamplingParams
from seer.verify.compare import Comparison, Mismatch, Verdict
from seer.verify.trainer_pass import TrainerPass

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_MISMATCHES = 10
"""Mismatches spelled out per cell, bugs first; the JSON has them all."""


class CellReport(msgspec.Struct, kw_only=True):
    """One cell. `unmet` lists what it should have exercised; `error` why it did not finish.

    The cell ran with `chunk_size` and `n` responses per prompt; 0: not chunked. `sampling`: None for the
    whole report's.
    """

    name: str
    about: str
    chunk_size: int = 0
    n: int = 0
    seconds: float = 0.0
    counters: dict[str, int] = {}
    unmet: list[str] = []
    error: str = ""
    comparison: Comparison | None = None
    sampling: SamplingParams | None = None

    @property
    def mismatches(self) -> list[Mismatch]:
        """All differences from the reference, to be replaced as they are judged."""
        return [] if self.comparison is None else self.comparison.mismatches

    @property
    def with_teacher(self) -> list[Mismatch]:
        """Differences of logprobs of which it is known what the teacher has."""
        return [m for m in self.mismatches if m.kind == "logprob" and m.expected is not None]

    def count(self, verdict: Verdict, *, judged: bool = False) -> int:
        """Count mismatches of a verdict, or only measured mismatches."""
        return sum(m.verdict == verdict and (m.gap is not None or not judged) for m in self.mismatches)

    @property
    def flips_per_million(self) -> float:
        """Token mismatches per 10^6 tokens compared."""
        if self.comparison is None or not self.comparison.tokens:
            return 0.0
        return 1e6 * sum(m.kind == "token" for m in self.mismatches) / self.comparison.tokens


class Fault(msgspec.Struct, frozen=True):
    """A wrong key planted on purpose: in which cell, at which absolute position."""

    cell: str
    position: int


class Report(msgspec.Struct, kw_only=True):
    """The whole verification; `reference` is a cell without a comparison.

    `skipped` says of each cell that did not run why; `named`: cells were asked for by name.
    """

    versions: dict[str, str]
    dtype: str
    seed: int
    rollout_number: int
    n: int
    prompts: int
    sampling: SamplingParams
    min_tokens: int
    logprob_tolerance: float
    skipped: dict[str, str]
    reference: CellReport
    cells: list[CellReport] = []
    fault: Fault | None = None
    named: bool = False
    trainer: TrainerPass | None = None

    @property
    def tokens_compared(self) -> int:
        """Tokens compared in all cells that prove something."""
        return sum(cell.comparison.tokens for cell in self.proving if cell.comparison is not None)

    @property
    def proving(self) -> list[CellReport]:
        """Cells that did what they are there for."""
        return [cell for cell in self.cells if not (cell.unmet or cell.error)]

    @property
    def routes(self) -> tuple[int, int]:
        """How many tokens' experts were compared, in each layer with experts, and how many differ."""
        compared = [cell.comparison for cell in self.proving if cell.comparison is not None]
        return sum(each.routes for each in compared), sum(each.other_routes for each in compared)

    def left_out(self) -> dict[str, str]:
        """Return why cells prove nothing, by name."""
        unmet = {cell.name: f"did not exercise {', '.join(cell.unmet)}" for cell in self.cells if cell.unmet}
        return self.skipped | unmet

    def count(self, verdict: Verdict) -> int:
        """Count mismatches of a verdict in all cells."""
        return sum(cell.count(verdict) for cell in self.cells)

    def failures(self) -> list[str]:
        """Return why this report does not pass; empty: it passes."""
        found = []
        if self.reference.unmet:
            found.append(f"{self.reference.name} did not exercise {', '.join(self.reference.unmet)}")
        if self.named:
            found += [f"{name} {why}" for name, why in self.left_out().items()]
        elif not any(cell.comparison for cell in self.proving):
            found.append("no cell could be exercised: give more prompts, -n or --max-tokens")
        for cell in self.cells:
            if cell.error:
                found.append(f"{cell.name} did not finish: {cell.error}")
            if cell.count("bug"):
                found.append(f"{cell.name} has {cell.count('bug')} bugs, {cell.count('unjudged')} unjudged")
            if blamed := sum(mismatch.blames_reference for mismatch in cell.with_teacher):
                found.append(
                    f"{cell.name} has the teacher's logprobs in {blamed} of {len(cell.with_teacher)} that "
                    f"differ: the engine of {self.reference.name} computed wrongly, whatever the schedule"
                )
            if inexact := self._inexact(cell):
                found.append(f"{cell.name} has {inexact}: batch-invariant kernels leave none")
        if self.trainer is not None and not self.trainer.best.largest <= self.logprob_tolerance:
            found.append("the trainer's logprobs differ by more than rounding (--logprob-tolerance)")
        if self.tokens_compared < self.min_tokens:
            found.append(
                f"only {self.tokens_compared} tokens were compared, at least {self.min_tokens} are needed "
                "(--min-tokens): give more prompts, -n or --max-tokens"
            )
        if self.fault is not None:
            caught = any(cell.name == self.fault.cell and cell.count("bug") for cell in self.cells)
            how = "the planted fault was found" if caught else "THE PLANTED FAULT WAS NOT FOUND"
            found.append(f"{how} (in {self.fault.cell}, at absolute position {self.fault.position})")
        return found

    def _inexact(self, cell: CellReport) -> str:
        """Return which last bits differ in a cell in which none may; empty: none, or they may."""
        ranks = ("tensor_parallel", "data_parallel")
        other = any(cell.counters.get(name) != self.reference.counters.get(name) for name in ranks)
        if self.versions.get("batch_invariant") != "yes" or other:
            return ""
        if numeric := cell.count("numeric"):
            return f"{numeric} numeric mismatches"
        largest = cell.comparison.max_logprob_difference if cell.comparison else 0.0
        return f"logprobs that differ by {largest:.0e}" if largest else ""

    def as_json(self) -> dict[str, object]:
        """Return everything, with the sums; numbers that are not finite become null."""
        failures = self.failures()
        whole: dict[str, object] = {
            "passed": not failures,
            "failures": failures,
            "tokens_compared": self.tokens_compared,
        }
        whole |= {verdict: self.count(verdict) for verdict in VERDICTS}
        whole |= _plain(self)
        whole["cells"] = [
            _plain(cell)
            | {verdict: cell.count(verdict) for verdict in VERDICTS}
            | {"flips_per_million": cell.flips_per_million}
            for cell in self.cells
        ]
        return whole


VERDICTS: tuple[Verdict, ...] = ("numeric", "bug", "unjudged")


def show(report: Report, console: Console) -> None:
    """Print the table, the mismatches and the conclusion."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("cell", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in [report.reference, *report.cells]:
        table.add_row(cell.name, *_figures(cell))
    console.print(table)
    for name, why in report.left_out().items():
        console.print(f"{name}: left out: {why}")
    for cell in report.cells:
        for mismatch in sorted(cell.mismatches, key=lambda m: m.verdict)[:SHOWN_MISMATCHES]:
            console.print(f"{cell.name}: {_described(mismatch)}")
        hidden = len(cell.mismatches) - SHOWN_MISMATCHES
        if hidden > 0:
            console.print(f"{cell.name}: {hidden} more; --json has them all")
    _conclude(report, console)


def _plain(struct: msgspec.Struct) -> dict[str, object]:
    # By way of JSON, which has no infinity: msgspec writes null, json.dumps would write nonsense.
    plain: dict[str, object] = msgspec.json.decode(msgspec.json.encode(struct))
    return plain


def _conclude(report: Report, console: Console) -> None:
    failures = report.failures()
    console.print(
        f"{'FAILED' if failures else 'PASSED'}: {report.tokens_compared} tokens compared in "
        f"{len(report.proving)} cells (at least {report.min_tokens} needed), {len(report.left_out())} left "
        f"out, {report.count('numeric')} numeric mismatches, {report.count('bug')} bugs"
    )
    compared, other = report.routes
    if compared:
        console.print(f"experts of {compared} tokens (each layer counts) compared, {other} differ")
    if report.trainer is not None:
        console.print(report.trainer.verdict(report.logprob_tolerance))
    for line in failures:
        console.print(f"- {line}")


_HEADINGS = (
    "tokens", "numeric", "bugs", "flips/10⁶", "Δlogprob",
    "chunks", "migrated", "preempted", "pulled", "seconds",
)  # fmt: skip
_EXERCISED = ("chunks", "migrations", "preemptions", "pool_tokens")


def _figures(cell: CellReport) -> list[str]:
    if cell.error:
        return ["-"] * len(_HEADINGS)
    compared = [str(cell.counters["tokens"]), "-", "-", "-", "-"]
    if cell.comparison is not None:
        compared = [
            str(cell.comparison.tokens),
            str(cell.count("numeric")),
            str(cell.count("bug")),
            f"{cell.flips_per_million:.1f}",
            f"{cell.comparison.max_logprob_difference:.0e}",
        ]
    exercised = [str(cell.counters[name]) for name in _EXERCISED]
    return [*compared, *exercised, f"{cell.seconds:.1f}"]


def _described(m: Mismatch) -> str:
    where = f"{m.verdict}: {m.kind} of {m.prompt_id}#{m.index} at {m.position}"
    what = f"{m.reference} in the reference, {m.found} here"
    if m.expected is not None:
        what = f"{what}, {m.expected} by the teacher"
    if m.gap is None or m.error is None:
        return f"{where}: {what}"
    return f"{where}: {what}; gap {m.gap:.2e}, error {m.error:.2e}"
