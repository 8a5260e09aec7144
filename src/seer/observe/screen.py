"""What `seer top` shows: lines of text, made of two `Status` messages and the terminal's size. Pure.

Invariants (tests/unit/test_top_screen.py):
- it fits: no more lines and cells than the terminal has, from 20 by 5 on;
- texts of peers appear with all control characters escaped, each on its own line;
- the tables scroll, the rest stays; scrolling ends with the last line;
- every word of the tables is explained (`WORDS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from seer.common.process.log import printable
from seer.common.wire import InstanceStatus, OpenRequest, RolloutStatus, Status

BARS = "▁▂▃▄▅▆▇█"

MOST_ROLLOUTS = 4
"""Rollouts above the tables; more of them scroll with these."""

NAME_CELLS, BAR_CELLS, LEAST_NAME_CELLS = 12, 8, 8
"""What a name and a bar have on 80 columns; a name gets most of what is wider, a rollout's what is left."""

HEAD = ("run", "wait", "booked", "tokens/s", "accepted", "cached", "lost", "starts")
_WIDTHS = (4, 5, 7, 9, 9, 7, 5, 7)

OPEN_HEAD = ("open", "run", "tokens", "of about")
_OPEN_WIDTHS = (5, 4, 9, 10)

WORDS = (
    ("rollout", "all that a trainer submitted at once; an open one gets prompts as they come"),
    ("tokens", "generated so far; of chunks that run, about, by what engines report every second"),
    ("ends in about", "the larger of the work left at the present rate, and the longest response left"),
    (
        "ends in A to B",
        "before a tenth has finished: if lengths are a third of those expected, or all max_tokens",
    ),
    ("in its tail", "nine tenths of the responses have finished, for so long"),
    ("held", "responses that wait for weights, an engine, or the end of sleep"),
    ("engine", "a replica of the model; x8: of 8 data-parallel ranks"),
    ("run, wait", "chunks that an engine runs, and those it has not begun"),
    ("KV used", "share of the engine's KV blocks that hold something"),
    ("booked", "share of them that the chunks that run can need at most: at 100 % others wait"),
    ("tokens/s", "since the last second; - : not known yet"),
    ("accepted", "tokens per step and response, accepted drafts included"),
    ("cached", "share of prompt tokens whose KV was there already"),
    ("lost", "chunks that ran there for nothing, as the engine died or failed"),
    ("starts", "how often the engine was started since the buffer was"),
    ("p18#3", "response 3 to prompt p18: the longest of this prompt that runs, or else waits"),
    ("open, run", "of the prompt's responses: those that have not finished, and those of them that run"),
    ("of about", "the expected length of the longest, from all that is known of the prompt's responses"),
    ("chunk", "how often the longest was placed; it runs a chunk at a time"),
)
"""What `?` shows: a word on the screen, and what it means."""


class Glance(NamedTuple):
    """Two answers, `seconds` apart; `problem`: why there is no new one. `rates`: tokens/s, the last ones."""

    now: Status
    before: Status | None = None
    seconds: float = 1.0
    rates: Sequence[float] = ()
    problem: str = ""


def screen(
    glance: Glance, width: int, height: int, scroll: int = 0, explained: bool = False
) -> tuple[Text, int]:
    """Return the screen, and with which line the tables, or what their words mean, begin.

    That is `scroll`, or the last one that hides nothing above what there is room for.
    """
    head = _head(glance, width)
    body = _words(width) if explained else _body(glance, width)
    room = max(1, height - len(head) - 1)
    first = min(scroll, max(0, len(body) - room))
    shown = body[first : first + room]
    hidden = len(body) - len(shown)
    more = f" ({hidden} more lines)" if hidden else ""
    foot = Text(f"q quit   ? {'back' if explained else 'what words mean'}   ↑ ↓ scroll{more}", style="dim")
    if glance.problem:
        foot = Text(_clean(f"away, and asked again: {glance.problem}"), style="bold red")
    filled = [*head, *shown, *[Text()] * (room - len(shown))]
    return Text("\n").join(_cut(each, width) for each in (*filled[: height - 1], foot)), first


def tokens_per_second(glance: Glance) -> float:
    """Return what all engines that are in both answers generated in between, per second."""
    return sum(each or 0.0 for each in _rates(glance).values())


def _rates(glance: Glance) -> dict[str, float | None]:
    """Return tokens/s by engine; None: unknown, as the engine is new, or was started again."""
    known = {each.name: each for each in glance.before.instances} if glance.before else {}
    rates: dict[str, float | None] = {}
    for each in glance.now.instances:
        earlier = known.get(each.name)
        same = earlier is not None and earlier.restarts == each.restarts
        more = each.stats.generated_tokens - earlier.stats.generated_tokens if earlier and same else -1
        rates[each.name] = more / glance.seconds if more >= 0 else None
    return rates


# --- above the tables ------------------------------------------------------------------------


def _head(glance: Glance, width: int) -> list[Text]:
    status = glance.now
    engines = f"{len(status.instances)} engines"
    others = status.engines - len(status.instances)
    parts = [
        f"policy {status.policy}",
        f"weights v{status.weight_version}",
        f"{engines} + {others} not serving" if others > 0 else engines,
        f"up {duration(status.uptime_seconds)}",
    ]
    title = Text.assemble(("seer top", "bold"), "   ", _clean("   ".join(parts)))
    work = f"{status.requests_running:,} running   {status.requests_waiting:,} waiting"
    work += f"   {status.requests_held:,} held" if status.requests_held else ""
    work += f"   {tokens_per_second(glance):,.0f} tokens/s {sparkline(glance.rates)}"
    rollouts = [_rollout(each, width) for each in status.open_rollouts[:MOST_ROLLOUTS]]
    if not rollouts:
        rollouts = [Text("no rollout is open", style="dim")]
    failing = [
        Text(_clean(f"{name} not written for {duration(each.seconds)}: {each.problem}"), style="bold red")
        for name, each in sorted(status.unwritten.items())
    ]
    if status.draining:
        failing.append(
            Text("draining: finishes what it began; the rest waits for its successor", "bold yellow")
        )
    last = Text.assemble(("asleep   " if status.asleep else "", "bold yellow"), work)
    return [title, *failing, *rollouts, last]


def _rollout(rollout: RolloutStatus, width: int) -> Text:
    tokens = max(rollout.generated, rollout.tokens)  # a buffer before protocol 3.3 tells those that came only
    parts = [f"{rollout.finished:,}/{rollout.requests:,} responses", f"{tokens:,} tokens"]
    if rollout.open:
        parts.append("open")
    if rollout.tail_seconds is not None:
        parts.append(f"in its tail for {duration(rollout.tail_seconds)}")
    if rollout.eta_seconds is not None:
        parts.append(f"ends in about {duration(rollout.eta_seconds)}")
    elif rollout.eta_least is not None and rollout.eta_most is not None:
        parts.append(f"ends in {duration(rollout.eta_least)} to {duration(rollout.eta_most)}")
    else:
        parts.append(f"for {duration(rollout.seconds)}")
    rest = "   ".join(parts)
    room = max(LEAST_NAME_CELLS, width - len("rollout ") - len("   ") - cell_len(rest))
    return Text.assemble("rollout ", (_short(rollout.rollout_id, room), "bold"), "   ", rest)


# --- the tables ------------------------------------------------------------------------------


def _body(glance: Glance, width: int) -> list[Text]:
    status = glance.now
    name = max(NAME_CELLS, min(40, width - 80 + NAME_CELLS))
    rates = _rates(glance)
    known = {each.name: each for each in glance.before.instances} if glance.before else {}
    body = [_rollout(each, width) for each in status.open_rollouts[MOST_ROLLOUTS:]]
    body.append(_table_head(name))
    body += [
        _engine(each, known.get(each.name), rates[each.name], status.lost_chunks.get(each.name, 0), name)
        for each in status.instances
    ]
    if not status.instances:
        body.append(Text("no engine serves", style="yellow"))
    for each, why in sorted(status.quarantined.items()):
        body.append(Text(_clean(f"{each}: QUARANTINED: {why}"), style="red"))
    if status.longest_open:
        columns = "".join(f"{title:>{cells}}" for title, cells in zip(OPEN_HEAD, _OPEN_WIDTHS, strict=True))
        body.append(Text(f"{'longest by prompt':<{name + 6}}{columns}", style="dim"))
        several = len({each.rollout_id for each in status.longest_open}) > 1
        body += [_open(each, name + 6, several) for each in status.longest_open]
    return body


def _words(width: int) -> list[Text]:
    """Return what words mean, each meaning beside its word on as many lines as it needs."""
    indent = max(len(word) for word, _ in WORDS) + 2
    lines: list[Text] = []
    for word, meaning in WORDS:
        for number, part in enumerate(wrap(meaning, max(20, width - indent))):
            lines.append(Text.assemble((f"{'' if number else word:<{indent}}", "bold"), part))
    return lines


def _table_head(name: int) -> Text:
    columns = [f"{title:>{cells}}" for title, cells in zip(HEAD, _WIDTHS, strict=True)]
    kv = f" {'KV used':<{BAR_CELLS + 5}}"
    return Text(set_cell_size("engine", name) + "".join(columns[:2]) + kv + "".join(columns[2:]), style="dim")


def _engine(
    it: InstanceStatus, earlier: InstanceStatus | None, rate: float | None, lost: int, name: int
) -> Text:
    stats, blocks = it.stats, max(it.capacity.kv_blocks, 1)
    used = min(max(1 - stats.free_blocks / blocks, 0.0), 1.0)
    drafted = stats.verifications - (earlier.stats.verifications if earlier else 0)
    accepted = stats.accepted_tokens - (earlier.stats.accepted_tokens if earlier else 0)
    texts = (
        f"{stats.running}", f"{stats.waiting}", f"{it.reserved_blocks / blocks:.0%}",
        "-" if rate is None else f"{rate:,.0f}",
        f"{1 + accepted / drafted:.2f}" if drafted > 0 <= accepted else "-",
        f"{stats.cached_tokens / stats.prompt_tokens:.0%}" if stats.prompt_tokens else "-",
        f"{lost}", f"{it.restarts + 1}",
    )  # fmt: skip
    columns = [f"{text:>{cells}}" for text, cells in zip(texts, _WIDTHS, strict=True)]
    ranks = f" x{it.capacity.parts}" if it.capacity.parts > 1 else ""
    shown = set_cell_size(_clean(it.name), name - cell_len(ranks)) + ranks
    line = Text(shown + "".join(columns[:2]) + " ")
    line.append("█" * round(used * BAR_CELLS), style="green" if used < 0.95 else "yellow")
    line.append("·" * (BAR_CELLS - round(used * BAR_CELLS)), style="dim")
    line.append(f" {used:>4.0%}" + "".join(columns[2:]))
    return line


def _open(it: OpenRequest, name: int, several: bool) -> Text:
    """Return the row of a prompt; the rollout is named where there are `several`."""
    what = f"{it.prompt_id}#{it.index}"
    what = f"{it.rollout_id} {what}" if several else what
    counts = (f"{it.open}", f"{it.running}") if it.open else ("-", "-")  # a buffer before protocol 3.3
    texts = (*counts, f"{it.generated:,}", f"{it.expected:,.0f}")
    columns = "".join(f"{text:>{cells}}" for text, cells in zip(texts, _OPEN_WIDTHS, strict=True))
    where = f"{it.engine}, chunk {it.chunks}" if it.engine else f"waits, after {it.chunks} chunks"
    return Text(f"{set_cell_size(_short(what, name), name)}{columns}  {_clean(where)}")


# --- texts -----------------------------------------------------------------------------------


def _clean(text: str) -> str:
    return str(printable(text)).replace("\n", "\\n")


def _short(text: str, cells: int) -> str:
    """Return a text of peers within so many cells: its end, which tells names apart."""
    text = _clean(text)
    if cell_len(text) <= cells:
        return text
    while cell_len(text) > cells - 1:
        text = text[1:]
    return f"…{text}"


def _cut(line: Text, width: int) -> Text:
    if cell_len(line.plain) > width:
        line = line.copy()
        line.truncate(width, overflow="ellipsis")
    return line


def duration(seconds: float) -> str:
    """Return a time as people say it: two units at most."""
    whole = max(0, round(seconds))
    for unit, of, small, below in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= of:
            return f"{whole // of} {unit} {whole % of // below:02} {small}"
    return f"{whole} s"


def sparkline(rates: Sequence[float]) -> str:
    """Return bars as high as the rates, the highest of which is full."""
    top = max(rates, default=0.0)
    if top <= 0:
        return ""
    return "".join(BARS[min(int(each / top * len(BARS)), len(BARS) - 1)] for each in rates)
