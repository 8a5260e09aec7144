"""Every mutant has something to change; how one is found, and put into a module's import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mutants as listed
import pytest
from mutants import ROOT, Mutant, Stale, mutants, mutated, place_of

SOURCE = """
class A:
    def f(self, x):
        if x > 1 and (  # why
            x > 2
        ):
            self.g(
                x,
            )
        return x > 1

    def h(self, x):
        self.g(x)


def f(x):
    return x > 1
"""
ALL = mutants()


def change(monkeypatch, old, new, within):
    monkeypatch.setattr(listed, "_sources", lambda: {ROOT / "common" / "a.py": SOURCE})
    mutant = Mutant(promise="", within=within, old=old, new=new, tests=[])
    return mutated(mutant), place_of(mutant)


@pytest.mark.parametrize("name", ALL)
def test_every_mutant_has_one_place_to_change(name):
    """If this fails you changed what a mutant changes: say in its file what it has to be now."""
    mutant = ALL[name]
    compile(mutated(mutant), place_of(mutant).path, "exec")
    assert mutant.old.split() != mutant.new.split()
    assert mutant.tests
    assert all((ROOT / "tests" / test).exists() for test in mutant.tests)


def test_a_fragment_is_found_in_functions_of_its_name_whatever_their_layout(monkeypatch):
    text, place = change(monkeypatch, "self.g(x,)", "pass", "A.f")
    assert (text.count("pass"), place.module) == (1, "seer.common.a")
    assert place.path == Path(ROOT, "common", "a.py")
    assert "self.k(x)" in change(monkeypatch, "self.g(x)", "self.k(x)", "A.h")[0]
    assert change(monkeypatch, "x > 1", "x > 9", "f")[0].endswith("return x > 9\n")


@pytest.mark.parametrize(
    ("old", "within", "times"), [("x > 1", "A.f", 2), ("x > 3", "A.f", 0), ("x > 1", "B.f", 0), ("x", "A", 0)]
)
def test_what_is_not_there_once_is_an_error(monkeypatch, old, within, times):
    with pytest.raises(Stale, match=f"occurs {times} times"):
        change(monkeypatch, old, "True", within)


def test_a_module_is_imported_with_its_mutant_and_its_test_fails():
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "mutants.plugin",
         "tests/unit/test_chunk_gate.py"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests"), "SEER_MUTANT": "tokens/one-block-too-many"},
    )  # fmt: skip
    assert (ran.returncode, " failed" in ran.stdout) == (1, True), ran.stdout
