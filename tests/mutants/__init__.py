"""Deliberate faults in the code, each of which breaks a promise: a file of them for each kind of promise.

A mutant is found by the name of its function, wherever that lies: `within` is `function` or `Class.method`,
`old` a fragment of its text, and `new` takes its place. White space between the words of a fragment is any.

Invariants (tests/unit/test_mutants.py asserts them):
- `old` occurs exactly once in all functions of that name: a mutant whose code has moved on is an error, never
  a mutant that silently tests nothing;
- a mutant says which promise it breaks, and which test files notice it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PRODUCT = ("common", "services", "client", "sim", "src/seer")


class Stale(ValueError):  # noqa: N818 - reads as what it says
    """The code that a mutant changes is not there, or there more than once."""


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change of one function, the promise that it breaks, and the files in tests/ that notice."""

    promise: str
    within: str
    old: str
    new: str
    tests: list[str]


class Place(msgspec.Struct, frozen=True):
    """Where a mutant changes a file of the product: `source` is its text, `span` what is replaced."""

    path: Path
    source: str
    span: tuple[int, int]

    @property
    def module(self) -> str:
        """As Python imports the file."""
        path = self.path.relative_to(ROOT).as_posix()
        return "seer." + path.removeprefix("src/seer/").removesuffix(".py").replace("/", ".")


def mutants() -> dict[str, Mutant]:
    """Read all, by `file/name`."""
    listed: dict[str, Mutant] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        read = msgspec.toml.decode(path.read_bytes(), type=dict[str, Mutant])
        listed |= {f"{path.stem}/{name}": mutant for name, mutant in read.items()}
    return listed


def place_of(mutant: Mutant) -> Place:
    """Return where a mutant changes what. Raises `Stale`."""
    fragment = re.compile(r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", mutant.old))))
    name = mutant.within.rpartition(".")[2]
    found: list[Place] = []
    for path, source in _sources().items():
        for begin, end in _functions(source, mutant.within) if f"def {name}(" in source else ():
            found += [Place(path, source, match.span()) for match in fragment.finditer(source, begin, end)]
    if len(found) != 1:
        raise Stale(
            f"{mutant.within}: the code of a mutant occurs {len(found)} times in functions of this name, not"
            f" once: say in `within` and `old` what it is to change now\n{mutant.promise}\n{mutant.old}"
        )
    return found[0]


def mutated(mutant: Mutant) -> str:
    """Return the text of its file with the change made. Raises `Stale`."""
    place = place_of(mutant)
    begin, end = place.span
    return place.source[:begin] + mutant.new + place.source[end:]


@cache
def _sources() -> dict[Path, str]:
    files = sorted(path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))
    return {path: path.read_text() for path in files}


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _functions(source: str, within: str) -> Iterator[tuple[int, int]]:
    """Yield where functions of this dotted name begin and end in a file."""
    nodes: list[ast.AST] = [_parsed(source)]
    for name in within.split("."):
        nodes = [each for node in nodes for each in ast.iter_child_nodes(node) if _name(each) == name]
    lines = source.splitlines(keepends=True)
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield len("".join(lines[: node.lineno - 1])), len("".join(lines[: node.end_lineno]))


def _name(node: ast.AST) -> str:
    return node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ""
