"""What a doctor's lines come to: whether this machine is ready, and settings that fit it.

Invariants (tests/unit/test_doctor_verdict.py asserts them):
- a function of the lines alone; one that fails makes the machine not ready, one that is slow, slower than it
  could be;
- a setting is recommended only if a line measured what it depends on, and says so in its reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from seer.common.types import MAX_CONTEXT
from seer.doctor.report_lines import Figure, Line

ACCEPTED = 0.6
"""Chance that a drafted token is accepted if all before it were: a guess, before there are responses."""

SAME_SPEED = 0.98
"""A batch with this share of the best one's tokens a second is as good, and leaves requests more KV."""

_SHOWN = 5

Figures = Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class Setting:
    """A line of the configuration: `value` as TOML has it."""

    section: str
    key: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a report."""

    state: Literal["ready", "slower", "not ready", "unknown"]
    text: str
    settings: tuple[Setting, ...]
    instances: int = 0
    """Engines for this machine; 0: unknown."""

    def shown(self) -> str:
        """Return it as people read it; the settings can be pasted into a configuration."""
        rows = [f"verdict: {self.text}"]
        if self.settings:
            rows.append("settings that fit this machine, by what was measured:")
        if self.settings and self.instances:
            rows.append(f"# seer up --instances {self.instances}")
        section = ""
        for each in self.settings:
            if each.section != section:
                section = each.section
                rows.append(f"[{section}]")
            rows.append(f"{each.key} = {each.value}  # {each.reason}")
        return "\n".join(rows)


def verdict(lines: Sequence[Line]) -> Verdict:
    """Return what these lines come to."""
    failed = [line for line in lines if line.status == "fail"]
    slow = [line for line in lines if line.status == "slow"]
    settings = tuple(sorted(_settings(lines), key=lambda each: (each.section, each.key)))
    planned = (line.figures for line in lines if (line.check, line.text) == ("limits", "planned"))
    instances = int(_number(next(planned, {}), "instances"))
    if failed:
        return Verdict("not ready", f"not ready: {_texts(failed)}", settings, instances)
    if not any(line.check == "start" and line.status == "pass" for line in lines):
        text = "nothing failed, but no engine was started: run all checks"
        return Verdict("unknown", text, settings, instances)
    if slow:
        text = f"ready, slower than it could be: {_texts(slow)}"
        return Verdict("slower", text, settings, instances)
    return Verdict("ready", "ready", settings, instances)


def _texts(lines: Sequence[Line]) -> str:
    shown = [f"{line.check}: {line.text}" for line in lines[:_SHOWN]]
    more = len(lines) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _settings(lines: Sequence[Line]) -> Iterator[Setting]:
    notes = {(line.check, line.text): line.figures for line in lines if line.status == "note"}
    steps = [line.figures for line in lines if (line.check, line.text) == ("step-table", "step")]
    if capacity := notes.get(("start", "capacity")):
        yield from _sizes(capacity)
    plain = {_number(row, "batch"): _number(row, "ms") for row in steps if not row["drafts"]}
    if plain:
        yield _batch(plain)
    if drafted := [row for row in steps if row["drafts"] and _number(row, "batch") in plain]:
        yield _drafts(plain, drafted)
    if fetching := notes.get(("pool", "fetching against computing")):
        yield _pool(fetching)
    ran = {_number(line.figures, "batch_invariant"): line.figures for line in lines if _is_chunk_cell(line)}
    if len(ran) > 1:
        yield _kernels(ran[1], ran[0])


def _sizes(capacity: Figures) -> Iterator[Setting]:
    block, batched = (f"{_number(capacity, name):.0f}" for name in ("block_size", "max_num_batched_tokens"))
    yield Setting("shared", "block_size", block, "what the engine resolved for this model")
    yield Setting("engine", "max_num_batched_tokens", batched, "what the engine resolved for this device")


def _batch(plain: Mapping[float, float]) -> Setting:
    """Judge batches by their tokens a second; `plain` are milliseconds of steps without drafts."""
    speeds = {batch: 1e3 * batch / ms for batch, ms in plain.items()}
    batch = min(batch for batch, speed in speeds.items() if speed >= SAME_SPEED * max(speeds.values()))
    why = f"so many requests generate the most: {speeds[batch]:,.0f} tokens/s at short contexts"
    return Setting("engine", "max_num_seqs", f"{batch:.0f}", why)


def _drafts(plain: Mapping[float, float], drafted: Sequence[Figures]) -> Setting:
    """Judge drafts by the batch at which they gain most, which is that of a rollout's tail."""

    def gain(row: Figures) -> float:
        return _yield(_number(row, "drafts")) / longer(row)

    def longer(row: Figures) -> float:
        return _number(row, "ms") / plain[_number(row, "batch")]

    best = max(drafted, key=gain)
    if gain(best) <= 1:
        return Setting(
            "drafts", "source", json.dumps("off"), "steps with drafts take too long to pay at any batch"
        )
    why = (
        f"a step of {best['batch']} with {best['drafts']} drafts each takes {longer(best):.2f} times as long"
    )
    return Setting("drafts", "source", json.dumps("grouped"), why)


def _yield(drafts: float) -> float:
    """Return the tokens that a verification of so many drafts yields on average."""
    return sum(ACCEPTED**place for place in range(int(drafts) + 1))


def _pool(fetching: Figures) -> Setting:
    pull, computed = (_number(fetching, name) for name in ("pull_tokens", "prefill_tokens_per_s"))
    if pull >= MAX_CONTEXT:
        why = f"fetching KV takes longer than computing it, at {computed:,.0f} tokens/s"
        return Setting("pool", "kind", json.dumps("none"), why)
    why = f"fetching beats computing from {pull:.0f} missing tokens on, which engines find out themselves"
    return Setting("pool", "kind", json.dumps("mooncake"), why)


def _is_chunk_cell(line: Line) -> bool:
    return line.check in ("same-tokens", "other-kernels") and line.figures.get("cell") == "chunk-16"


def _kernels(invariant: Figures, fast: Figures) -> Setting:
    """Judge batch-invariant kernels by what they cost, and what differs without."""
    rate = _number(fast, "differences_per_million")
    longer = _number(invariant, "seconds") / max(_number(fast, "seconds"), 1e-9)
    why = f"without, {rate:.0f} of a million tokens differ; with, a rollout takes {longer:.2f} times as long"
    return Setting("engine", "batch_invariant", "true" if rate else "false", why)


def _number(figures: Figures, name: str) -> float:
    """Return a figure, 0 for one that is missing or no number."""
    value = figures.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
