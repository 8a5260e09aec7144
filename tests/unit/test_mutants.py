"""The lists of mutants fit the code they change; how one is found, and put into a module's import."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
from mutants import ROOT, Mutant, Stale, load, mutated, names, place_of

SOURCE = """
class A:
    def f(self, x):
        if x > 1:  # why
            self.n += 1
            self.g(
                x,
            )
        return x > 1

    def h(self, x):
        self.n += 1
"""


def change(old, new, within=""):
    tree = mutated(SOURCE, Mutant(name="m", breaks="", old=old, new=new, within=within))
    return ast.unparse(tree)


@pytest.mark.parametrize("name", names())
def test_every_mutant_still_has_something_to_change(name):
    """If this fails you changed what a mutant changes: say in its list what it has to be now."""
    listed = load(name)
    tree = ast.parse((ROOT / listed.file).read_text())
    assert len({mutant.name for mutant in listed.mutants}) == len(listed.mutants)
    assert all((ROOT / test).exists() for test in listed.tests)
    for mutant in listed.mutants:
        place_of(tree, mutant)
        assert ast.dump(ast.parse(mutant.old)) != ast.dump(ast.parse(mutant.new)), mutant.name


def test_expressions_and_statements_are_found_whatever_their_layout():
    assert "self.g(0)" in change("self.g(x)", "self.g(0)")
    assert "pass\n        return" in change("if x > 1:\n  self.n += 1\n  self.g(x)", "")
    assert change("self.n += 1\nself.g(x)", "self.n += 2").count("+= 2") == 1
    assert "x >= 1:" in change("if x > 1:\n  self.n += 1\n  self.g(x)", "if x >= 1:\n  self.h(x)", "A.f")
    assert change("self.n += 1", "", "A.h").endswith("pass")


@pytest.mark.parametrize(
    ("old", "within", "times"),
    [("x > 1", "", 2), ("self.n += 1", "A", 2), ("x > 2", "", 0), ("x > 1", "A.h", 0)],
)
def test_what_is_not_there_once_is_an_error(old, within, times):
    with pytest.raises(Stale, match=f"occurs {times} times"):
        change(old, "True", within)
    with pytest.raises(Stale, match="0 functions or classes B"):
        change(old, "True", "B")


def test_a_module_is_imported_with_its_mutant_and_its_test_fails():
    test = "tests/unit/test_chunk_gate.py::test_nobody_overtakes"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutants.plugin", test],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "tests"), "SEER_MUTANT": "chunk_gate/overtakes"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert (ran.returncode, "1 failed" in ran.stdout) == (1, True), ran.stdout
