"""A rollout as one HTML file: inline SVG, no script, nothing from a network; the same bytes for the same log.

Colour-blind people tell the colours apart (Okabe and Ito; Tol); lost chunks are hatched besides.
"""

from __future__ import annotations

from seer.report.hard_prompts import HardPrompt
from seer.report.lost_share import Part
from seer.report.records import Chunk, End, Response
from seer.report.svg import LEFT, PLOT, RIGHT, WIDTH, Drawing, date, duration, short, text_of, ticks
from seer.report.trajectories import away
from seer.report.view import ENGINES, Bars, Floats, RolloutView, drawn_tail, lay_out, tail_chunks

PROMPT_COLOURS = (
    "#77aadd", "#eedd88", "#44bb99", "#ccccee", "#99ddff", "#bbcc33",
    "#aabbcc", "#e8c570", "#7fc8a9", "#b8a9d9", "#66ccee", "#ccdd66",
)  # fmt: skip
HARD_COLOURS = ("#332288", "#117733", "#882255", "#aa4499", "#775500", "#004488")
"""Of the hard prompts: darker than the others."""

ENGINE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#8c6d46", "#999999")

PART_COLOURS = {
    Part.USEFUL: "#228866", Part.LONGEST: "#99ccaa", Part.KV_FULL: "#0072b2", Part.TAIL: "#e6b800",
    Part.FEW: "#fff3a6", Part.AWAY: "#a0527f", Part.WAITS: "#e07b39", Part.LOST: "#b2182b",
    Part.OTHERS: "#d3d7de", Part.OVERHEAD: "#596273",
}  # fmt: skip
PART_KINDS = {part: f"s{number}" for number, part in enumerate(PART_COLOURS)}

_STYLE = """
text{font:11px system-ui,sans-serif;fill:#1d2433}
.title{font-size:18px;font-weight:600}.h{font-size:14px;font-weight:600}.n{fill:#596273;font-size:10px}
.v{font-size:17px;font-weight:600}.box{fill:#fff;stroke:#d5dae3}.red{fill:#b2182b;font-weight:600}
.g{stroke:#e3e7ee}.tail{fill:#fff3d6}.lane{fill:none;stroke:#c5ccd8;stroke-width:.6}.kv{fill:#0072b2;fill-opacity:.65}
.rate{fill:none;stroke:#0072b2;stroke-width:1.6}
.open{fill:none;stroke:#a0527f;stroke-width:1.6}
.o{fill:#d3d7de}.late{stroke:#111;stroke-width:.9}.thin{stroke-width:.4}.lost{fill:url(#hatch)}.dead{stroke:#b2182b;stroke-width:2}
.away{fill:#a0527f;fill-opacity:.45}
.span{fill:#596273;fill-opacity:.16}.bad{fill:#b2182b;fill-opacity:.2}
"""

_HATCH = (
    '<pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="4" height="4" fill="#b2182b"/><rect width="1" height="4" fill="#fff"/></pattern>'
)

_KEPT = (End.KEPT, End.RUNNING)

ROWS_HEIGHT = 900
"""Pixels for the rows of all engines, as far as a row keeps 2."""

LANES_HEIGHT = 640
"""Likewise for KV."""

KV_BINS, RATE_BINS = 500, 120

CURVE_HEIGHT = 80.0
"""Pixels for tokens/s, and as many for open responses."""


def page(view: RolloutView) -> str:
    """Return the file's text."""
    drawing = Drawing(view.start, view.end)
    _figures(drawing, view)
    _lost(drawing, view)
    layout = lay_out(view)
    _chunks(drawing, view, layout)
    _kv(drawing, view, layout.engines)
    _speed(drawing, view)
    _tail(drawing, view)
    name = text_of(view.rollout.rollout_id)
    return (
        '<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head><meta charset="utf-8"/>'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        f'<title>Rollout {name}</title></head><body style="margin:24px;background:#fff">\n'
        f"{drawing.svg(_style(), _HATCH)}\n</body></html>\n"
    )


def _style() -> str:
    prompts = "".join(f".p{number}{{fill:{colour}}}" for number, colour in enumerate(PROMPT_COLOURS))
    hard = "".join(f".h{number}{{fill:{colour}}}" for number, colour in enumerate(HARD_COLOURS))
    engines = "".join(f".e{number}{{fill:{colour}}}" for number, colour in enumerate(ENGINE_COLOURS))
    parts = "".join(f".{PART_KINDS[part]}{{fill:{colour}}}" for part, colour in PART_COLOURS.items())
    return prompts + hard + engines + parts + _STYLE  # the last rule wins: what was lost is red


def _figures(drawing: Drawing, view: RolloutView) -> None:
    rollout, timeline = view.rollout, view.timeline
    drawing.text(0, 18, f"Rollout {short(rollout.rollout_id, 100)}", "title")
    others = len(timeline.rollouts) - 1
    facts = [
        date(view.start),
        f"policy {timeline.policy}",
        f"{len(rollout.prompts):,} prompts",
        f"{len(view.engines):,} engines",
        f"seer {timeline.version}" if timeline.version else "",
        f"{others} other rollouts in the log: --rollout draws them" if others else "",
    ]
    drawing.text(0, 38, " · ".join(filter(None, facts)), "n")
    x, drawing.y = 0.0, 52.0
    for value, name in view.figures():
        width = max(10.4 * len(value), 5.9 * len(name)) + 20
        if x + width > WIDTH:
            x, drawing.y = 0.0, drawing.y + 54
        drawing.rect(x, drawing.y, width, 46, "box")
        drawing.text(x + 10, drawing.y + 21, value, "v")
        drawing.text(x + 10, drawing.y + 37, name, "n")
        x += width + 8
    drawing.y += 46


def _lost(drawing: Drawing, view: RolloutView) -> None:
    """Draw what the engines' time went into: a bar of all of it, and what each part of it is."""
    if view.lost is None:
        return
    drawing.head("Where the engines' time went", "all of it is what they could make at their best speeds")
    drawing.y += 4
    shares = view.lost.per_mille()
    x = 0.0
    for part, share in shares.items():
        width = WIDTH * share / 1000
        title = f"{part.title}: {share / 10:.1f} %"
        drawing.rect(x, drawing.y, width, 16, PART_KINDS[part], title)
        x += width
    drawing.y += 30
    for part, share in shares.items():
        drawing.rect(0, drawing.y - 9, 12, 10, PART_KINDS[part])
        drawing.text(18, drawing.y, part.title)
        drawing.text(170, drawing.y, f"{share / 10:.1f} %", "t", "end")
        drawing.text(240, drawing.y, f"{view.seconds * share / 1000:,.1f} s", "t", "end")
        drawing.text(256, drawing.y, part.meaning, "n")
        drawing.y += 15
    drawing.y -= 15


# --- chunks by engine ----------------------------------------------------------------------


def _chunks(drawing: Drawing, view: RolloutView, layout: Bars) -> None:
    drawing.head("Chunks by engine", "a row is a slot, a bar is a chunk, a colour is a prompt")
    whole = len(view.rollout.chunks) + len(view.others)
    notes = []
    if layout.count < whole:
        notes.append(_left_out(layout.step, len(layout.tail), layout.count, whole))
    if len(layout.engines) < len(view.engines):
        notes.append(f"{ENGINES} of {len(view.engines)} engines: those that were lost, and those of the tail")
    for note in notes:
        drawing.text(LEFT, drawing.y + 4, note, "n")
        drawing.y += 14
    _rows(drawing, view, layout)
    drawing.y += 32
    items = [(f"p{number}", "") for number in range(5)]
    items += [("p5", "a prompt each"), ("p0 late", "of the tail"), ("lost", "lost, failed or dropped")]
    drawing.legend([*items, ("o", "other rollouts"), ("tail", "the tail")])
    if view.hard:
        drawing.y += 16
        drawing.text(LEFT - 8, drawing.y, "hard prompts", "n", "end")
        drawing.legend([(f"h{number}", _hard_text(each)) for number, each in enumerate(view.hard)])


def _hard_text(prompt: HardPrompt) -> str:
    """Say what makes a prompt hard."""
    cut = f", {prompt.cut} of {prompt.responses} cut" if prompt.cut else ""
    return f"{short(prompt.prompt_id)}: {prompt.tokens:,.0f} tokens{cut}"


def _rows(drawing: Drawing, view: RolloutView, layout: Bars) -> None:
    """Draw the rows of all engines, one engine below the other."""
    height = min(7.0, max(2.0, ROWS_HEIGHT / max(1, sum(layout.rows.values()))))
    heights = {name: max(12.0, rows * height) for name, rows in layout.rows.items()}
    gap = 14.0  # a line of text is there when an engine is lost
    top = drawing.y + gap
    bottom = top + sum(heights.values()) + gap * (len(heights) - 1) + 4
    drawing.axis(top - 2, bottom, view.tail_start)
    _spans(drawing, view, top - 2, bottom)
    outline = dict.fromkeys(view.tail, "late" if height >= 4 else "late thin")
    drawing.y = top
    for name in layout.engines:
        drawing.text(LEFT - 8, drawing.y + heights[name] / 2 + 4, short(name), "t", "end")
        for row, chunk in layout.bars[name]:
            kind = f"{_kind(chunk, view)} {outline.get(chunk.response, '')}".rstrip()
            y = drawing.y + row * height
            drawing.bar(chunk.start, chunk.end, y, height - min(1.0, height / 4), kind, _title(chunk, view))
        _losses(drawing, view, name, drawing.y, heights[name])
        drawing.y += heights[name] + gap
    drawing.y = bottom


def _left_out(step: int, tail: int, drawn: int, whole: int) -> str:
    return (
        f"{drawn:,} of {whole:,} chunks are drawn: one slot in {step} of every engine, and below them "
        f"the last {tail} responses; --trace gives all of them to Perfetto"
    )


def _kind(chunk: Chunk, view: RolloutView) -> str:
    if chunk.how not in _KEPT:
        return "lost"
    if chunk.response.rollout is not view.rollout:
        return "o"
    return _hard_kind(chunk.response, view) or f"p{chunk.response.prompt % len(PROMPT_COLOURS)}"


def _hard_kind(response: Response, view: RolloutView) -> str:
    """Return the class of a hard prompt's colour; "": the prompt is not hard."""
    kinds = (f"h{number}" for number, each in enumerate(view.hard) if each.number == response.prompt)
    return next(kinds, "")


def _title(chunk: Chunk, view: RolloutView) -> str:
    response = chunk.response
    rollout = "" if response.rollout is view.rollout else f" of {response.rollout.rollout_id}"
    since = chunk.start - view.start
    what = f"{chunk.tokens} tokens after {chunk.context}" if chunk.how is End.KEPT else chunk.how.value
    return (
        f"{response.name}{rollout} on {chunk.engine}: {what}, {since:.2f} to {since + chunk.seconds:.2f} s"
        + (f", {chunk.preemptions} preemptions" if chunk.preemptions else "")
    )


def _losses(drawing: Drawing, view: RolloutView, name: str, y: float, height: float) -> None:
    for incarnation in view.lost_incarnations:
        if incarnation.name == name and incarnation.left is not None:
            x = drawing.x(incarnation.left)
            how = "died" if incarnation.died else "gone"
            text = f"{how}; chunks lost: {incarnation.chunks_lost}"
            drawing.line(x, y - 3, y + height + 3, "dead", text)
            right = x + 6 * len(text) > WIDTH - RIGHT
            drawing.text(x, y - 4, text, "red", "end" if right else "start")


def _spans(drawing: Drawing, view: RolloutView, top: float, bottom: float) -> None:
    """Shade when there was no buffer, and when weights were loaded or engines slept."""
    for span in view.spans:
        title = f"{span.text}, {duration(span.end - span.start, 0.1)}"
        drawing.bar(span.start, span.end, top, bottom - top, "bad" if span.failed else "span", title)
        drawing.text(drawing.x(span.start) + 3, bottom - 3, span.text, "red" if span.failed else "n")


# --- levels --------------------------------------------------------------------------------


def _kv(drawing: Drawing, view: RolloutView, engines: list[str]) -> None:
    drawing.head("KV booked", "the most that the chunks placed can need, as a share of each engine's blocks")
    pitch = min(28.0, max(8.0, LANES_HEIGHT / max(1, len(engines))))
    height = pitch - min(5.0, pitch / 4)
    edges = view.edges(KV_BINS)
    top = drawing.y
    drawing.axis(top, top + pitch * len(engines), view.tail_start)
    for name in engines:
        shares = view.booked(name, edges)
        y, bottom = drawing.y, drawing.y + height
        drawing.rect(LEFT, y, PLOT, height, "lane")
        points = [(float(LEFT), bottom)]
        for number, share in enumerate(shares):
            level = bottom - height * min(1.0, float(share))
            points += [(drawing.x(edges[number]), level), (drawing.x(edges[number + 1]), level)]
        drawing.curve("polygon", [*points, (float(LEFT + PLOT), bottom)], "kv")
        drawing.text(LEFT - 8, y + height / 2 + 4, short(name), "t", "end")
        drawing.text(LEFT + PLOT + 6, y + height / 2 + 4, f"mean {shares.mean():.0%}", "n")
        drawing.y += pitch
    drawing.y += 8


def _speed(drawing: Drawing, view: RolloutView) -> None:
    edges = view.edges(RATE_BINS)
    middles = (edges[:-1] + edges[1:]) / 2
    drawing.head("Tokens/s", "those that were kept, a chunk's spread evenly over its time")
    _curve(drawing, view, "rate", middles, view.token_rate(edges))
    drawing.head("Open responses", "those that have not finished")
    _curve(drawing, view, "open", edges, view.open_responses(edges))


def _curve(drawing: Drawing, view: RolloutView, kind: str, times: Floats, values: Floats) -> None:
    """Draw one curve over an axis of its own, from 0."""
    top, marks = drawing.y + 4, ticks(float(values.max()))
    drawing.axis(top, top + CURVE_HEIGHT, view.tail_start)
    for mark in marks:
        label = f"{mark:,.0f}" if mark >= 1000 else f"{mark:.4g}"
        drawing.level(top + CURVE_HEIGHT * (1 - mark / marks[-1]), label)
    points = zip(times.tolist(), (values / marks[-1]).tolist(), strict=True)
    drawing.curve("polyline", ((drawing.x(x), top + CURVE_HEIGHT * (1 - v)) for x, v in points), kind)
    drawing.y = top + CURVE_HEIGHT + 12


# --- the tail ------------------------------------------------------------------------------


def _tail(drawing: Drawing, view: RolloutView) -> None:
    shown = drawn_tail(view)
    part = "" if len(shown) == len(view.tail) else f", of {len(view.tail):,}"
    note = "a colour is an engine, a gap is waiting; left: hard prompts; right: tokens, and the time waited"
    drawing.head(f"The last {len(shown)} responses to finish{part}", note)
    pitch, top = 11.0, drawing.y
    drawing.axis(top, top + pitch * len(shown), view.tail_start)
    colour = {name: number % len(ENGINE_COLOURS) for number, name in enumerate(view.engines)}
    drawn = set(tail_chunks(shown))
    for response in shown:
        y = drawing.y
        drawing.text(LEFT - 8, y + 9, short(response.name), "n", "end")
        if hard := _hard_kind(response, view):
            drawing.rect(LEFT - 6, y + 1.5, 5, pitch - 3.5, hard, "a hard prompt")
        for number, (left, back) in enumerate(away(response), 1):
            title = f"{response.name}: away for {back - left:.1f} s after turn {number}"
            drawing.bar(left, back, y + 4, pitch - 8.5, "away", title)
        for chunk in response.chunks:
            if chunk in drawn:
                kind = f"e{colour[chunk.engine]}" if chunk.how in _KEPT else "lost"
                drawing.bar(chunk.start, chunk.end, y + 1, pitch - 2.5, kind, _title(chunk, view))
        waited = duration(*_waited(view, response))
        drawing.text(LEFT + PLOT + 4, y + 9, f"{response.generated:,} · {waited}", "n")
        drawing.y += pitch
    drawing.y += 32
    names = [name for name in view.engines if any(chunk.engine == name for chunk in drawn)]
    gap = [("away", "away, between turns")] if any(response.turns for response in shown) else []
    drawing.legend([*((f"e{colour[name]}", short(name, 30)) for name in names), ("lost", "lost"), *gap])


def _waited(view: RolloutView, response: Response) -> tuple[float, float]:
    """Return how long a response ran nowhere before its end, nor was away; and how exactly to say that."""
    end = view.end if response.finished is None else response.finished
    there = sum(chunk.seconds for chunk in response.chunks) + sum(
        back - left for left, back in away(response)
    )
    seconds = max(0.0, end - view.start - there)
    if seconds < 100:
        return seconds, 0.1
    return (seconds, 1.0) if seconds < 600 else (round(seconds / 60) * 60, 60.0)
