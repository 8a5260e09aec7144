"""Deliberate faults in the code, each of which a test must notice: the lists are the `*.toml` files here.

A list names a file, the tests that should notice, and its mutants: `old` is Python that becomes `new`, both
compared and put in as syntax trees, so that layout and comments do not matter. An `old` that is a whole
expression matches an expression, else one or more statements that follow each other; `within` narrows the
search to a function or class; an empty `new` leaves the statements out.

Invariants (tests/unit/test_mutants.py asserts them):
- `old` occurs exactly once where it is looked for: a mutant whose code has moved on is an error, never a
  mutant that silently tests nothing;
- a mutant says which promise it `breaks`; one that no test can notice says why in `survives`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


class Stale(ValueError):  # noqa: N818 - reads as what it says
    """The code that a mutant changes is not there, or there more than once."""


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change of one file; `survives` says why no test needs to notice it."""

    name: str
    breaks: str
    old: str
    new: str
    within: str = ""
    survives: str = ""


class Mutants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mutants of one file, and the tests that are to notice them, the fastest first."""

    file: str
    tests: list[str]
    mutants: list[Mutant]

    @property
    def module(self) -> str:
        """As Python imports the file."""
        return "seer." + self.file.removeprefix("src/seer/").removesuffix(".py").replace("/", ".")


def load(name: str) -> Mutants:
    """Read one list."""
    return msgspec.toml.decode((FOLDER / f"{name}.toml").read_bytes(), type=Mutants)


def names() -> list[str]:
    """Return the names of all lists."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """Return the syntax tree of `source` with the change made. Raises `Stale`."""
    tree = ast.parse(source)
    parent, field, at = place_of(tree, mutant)
    new = ast.parse(mutant.new or "pass").body
    if isinstance(at, slice):
        getattr(parent, field)[at] = new
    elif at is None:
        setattr(parent, field, _expression(new))
    else:
        getattr(parent, field)[at] = _expression(new)
    return ast.fix_missing_locations(tree)


Place = tuple[ast.AST, str, slice | int | None]
"""A node, its field that is to change, and where in it if that is a list."""


def place_of(tree: ast.Module, mutant: Mutant) -> Place:
    """Return where a mutant changes a module. Raises `Stale`."""
    scope = _scope(tree, mutant)
    old, new = ast.parse(mutant.old).body, ast.parse(mutant.new).body
    whole = _expression(old)
    places = (
        _statements(scope, old) if whole is None or _expression(new) is None else _expressions(scope, whole)
    )
    if len(places) != 1:
        raise Stale(
            f"{mutant.name}: its code occurs {len(places)} times in {mutant.within or 'the file'}, not once:"
            f" say in `old` and `within` what it is to change now\n{mutant.old}"
        )
    return places[0]


def _scope(tree: ast.Module, mutant: Mutant) -> ast.AST:
    scope: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef = tree
    for name in filter(None, mutant.within.split(".")):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in scope.body if isinstance(node, kinds) and node.name == name]
        if len(found) != 1:
            raise Stale(f"{mutant.name}: {len(found)} functions or classes {name}, not one ({mutant.within})")
        scope = found[0]
    return scope


def _expression(body: list[ast.stmt]) -> ast.expr | None:
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None


def _expressions(scope: ast.AST, old: ast.expr) -> list[Place]:
    places: list[Place] = []
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list):
                places += [(parent, field, at) for at, item in enumerate(value) if _same(item, old)]
            elif _same(value, old):
                places.append((parent, field, None))
    return places


def _statements(scope: ast.AST, old: list[ast.stmt]) -> list[Place]:
    places: list[Place] = []
    for parent in ast.walk(scope):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(parent, field, None)
            starts = range(len(body) - len(old) + 1) if isinstance(body, list) else ()
            places += [
                (parent, field, slice(at, at + len(old)))
                for at in starts
                if _same(body[at : at + len(old)], old)
            ]
    return places


def _same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, ast.AST):
        return all(_same(getattr(one, field, None), getattr(other, field, None)) for field in one._fields)
    return one == other
