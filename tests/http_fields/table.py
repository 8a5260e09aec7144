"""Compares what both servers answered, field by field, and writes docs/http_fields.md.

`python tests/http_fields/table.py` asks both servers and writes the page anew (minutes: vLLM's server starts).

Invariants:
- every field of vLLM's own models of its requests has a row;
- a field is `same` only where what was sent changed vLLM's answer, and the gateway's in the same way;
- what is neither the same nor refused has a reason in `REASONS`, and no reason is left over.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from http_fields.answers import Answer, Shape, apart, shapes
from http_fields.cases import Case, case_of
from http_fields.reasons import REASONS
from http_fields.routes import ROUTES
from http_fields.servers import Answers, Told, both

PAGE = Path(__file__).parents[2] / "docs" / "http_fields.md"
MARK = "<!-- below: written by tests/http_fields/table.py -->\n"

NOWHERE = "\N{EN DASH}"
"""Of a route whose body has no such field."""

READ, ASIDE, REFUSED, FAILS, ALWAYS = "reads", "leaves aside", "refuses", "fails", "always"
VERDICTS = {
    (REFUSED, READ): "refused",
    (REFUSED, ASIDE): "refused, aside in vLLM",
    (REFUSED, REFUSED): "both refuse",
    (ASIDE, ASIDE): "aside",
    (ASIDE, READ): "not read",
    (ASIDE, REFUSED): "not read, refused by vLLM",
    (ALWAYS, READ): "always",
    (READ, FAILS): "read, 500 from vLLM",
}
"""By what the gateway does with a field, and vLLM; where both read it, their answers are compared."""


@dataclass(frozen=True)
class Cell:
    """A field of a route: the verdict, what the gateway's refusal says, how answers and bad values differ."""

    verdict: str
    refusal: str = ""
    apart: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()


def outcome(case: Case, told: Told) -> str:
    """Return what a server did with a field; `ALWAYS`: without the field it does the same."""
    if _true(case, told.without, told.without):
        return ALWAYS
    if _true(case, told.with_it, told.without):
        return READ
    worst = status_of(told)
    return FAILS if worst >= 500 else REFUSED if worst >= 400 else ASIDE


def status_of(told: Told) -> int:
    """Return the worst status of answers with the field, alone if what stands beside it is refused."""
    beside_taken = all(answer.status == 200 for answer in told.without)
    return max(answer.status for answer in (told.with_it if beside_taken else [told.alone]))


def _true(case: Case, answers: list[Answer], without: list[Answer]) -> bool:
    try:
        return case.holds(answers, without)
    except (KeyError, IndexError, TypeError, AttributeError):
        return False  # an error's body


def compare(route: str, name: str, theirs: Told, ours: Told, usual: Shape) -> Cell:
    """Compare the answers to a case; `usual`: how the route's answers differ whatever is asked."""
    case = case_of(route, name)
    done = outcome(case, ours), outcome(case, theirs)
    bad = tuple(
        f"`{json.dumps(value)}`: {our.status}, vLLM {their.status}"
        for value, their, our in zip(case.bad, theirs.bad, ours.bad, strict=True)
        if (their.status >= 400) != (our.status >= 400)
    )
    if done != (READ, READ):
        refusal = refusal_of(ours.alone, name, case.value) if done[0] == REFUSED else ""
        return Cell(VERDICTS[done], refusal)
    differing = apart(shapes(ours.with_it), shapes(theirs.with_it)) - usual
    found = list(_told(differing))
    if not (case.beside.get("temperature") or case.times > 1):  # nothing was sampled
        found += ["another text"] * ([a.texts for a in ours.with_it] != [a.texts for a in theirs.with_it])
    return Cell("different" if found else "same", apart=tuple(found), bad=bad)


def _told(differing: Shape) -> Iterator[str]:
    for wanted in ("more", "absent", "another type"):
        if paths := sorted(path for path, how in differing if how == wanted):
            yield f"{wanted}: {', '.join(f'`{path}`' for path in paths)}"


def refusal_of(answer: Answer, name: str, value: object) -> str:
    """Return what a refusal says is to be done. Raises AssertionError for one that does not name the field."""
    error = answer.body.get("error") or {}
    assert name in (error.get("param") or ""), f"{name} is refused, but not by its name: {error}"
    message = str(error["message"])
    return message.partition(f"{value!r}: ")[2] or message.rpartition(": ")[2]


def usual_of(theirs: Answers, ours: Answers, route: str) -> Shape:
    """Return how answers of a route differ that have no other fields: whole ones, and streams."""
    plain = next(name for way, name in ours if way == route and not case_of(way, name).beside)
    told = apart(shapes(ours[route, plain].without), shapes(theirs[route, plain].without))
    if (route, "stream") in ours:
        told |= apart(shapes(ours[route, "stream"].with_it), shapes(theirs[route, "stream"].with_it))
    return told


def page(theirs: Answers, ours: Answers) -> str:
    """Return what is written below the mark."""
    usual = {route.name: usual_of(theirs, ours, route.name) for route in ROUTES}
    cells = {key: compare(*key, theirs[key], ours[key], usual[key[0]]) for key in theirs}
    routes = [route.name for route in ROUTES]
    lines = [f"| field | {' | '.join(routes)} | notes |", "|---" * (len(routes) + 2) + "|"]
    wanted: set[str] = set()
    for name in dict.fromkeys(name for _, name in cells):
        row = {route: cells[route, name] for route in routes if (route, name) in cells}
        shown = [row[route].verdict if route in row else NOWHERE for route in routes]
        lines.append(f"| `{name}` | {' | '.join(shown)} | {'; '.join(_notes(name, row, wanted))} |")
    assert wanted == set(REASONS), f"reasons of nothing: {set(REASONS) - wanted}"
    return "\n".join([*lines, "", *_usual_lines(usual)]) + "\n"


def _notes(name: str, row: dict[str, Cell], wanted: set[str]) -> list[str]:
    """Return what there is to say of a row, each once; adds the names of the reasons that it gives to `wanted`."""
    notes = [cell.refusal for cell in row.values() if cell.refusal]
    for route, cell in row.items():
        notes += [
            f"{route}: {', '.join(told)}" if len(row) > 1 else ", ".join(told)
            for told in (cell.apart, cell.bad)
            if told
        ]
        if cell.bad or cell.verdict.partition(",")[0] in ("different", "not read", "always"):
            key = f"{route}: {name}" if f"{route}: {name}" in REASONS else name
            wanted.add(key)
            notes.append(REASONS[key])
    return list(dict.fromkeys(notes))


def _usual_lines(usual: dict[str, Shape]) -> list[str]:
    told = {route: "; ".join(_told(differing)) for route, differing in usual.items()}
    head = "Whatever is asked, answers differ in these keys:"
    return [head, "", *(f"- {route}: {each}" for route, each in told.items() if each)]


def rows(page: str) -> dict[str, str]:
    """Return a page's rows, by field."""
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in lines}


def written(page: str) -> dict[tuple[str, str], str]:
    """Return the verdicts of a page, by route and field."""
    routes = [route.name for route in ROUTES]
    found = {}
    for name, line in rows(page).items():
        verdicts = line.strip("| ").split(" | ")[1 : 1 + len(routes)]
        found |= {
            (route, name): each for route, each in zip(routes, verdicts, strict=True) if each != NOWHERE
        }
    return found


if __name__ == "__main__":
    head, mark, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(head + mark + page(*both()))
