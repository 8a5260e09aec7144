"""A script's JSON becomes the tables of its section in `RESULTS.md`; the rest of the page stays."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "bench" / "lib" / "results.py"
SPEC = importlib.util.spec_from_file_location("results", SOURCE)
assert SPEC is not None
assert SPEC.loader is not None
results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results)

PAGE = """# Results

## One

```
python one.py
```
A line of context,
and another.

| old |
|---|
| 1 |

## Two

```
python two.py
```
Context.

| kept |
|---|
| 2 |
"""


def test_a_section_gets_the_tables_of_a_report_and_the_rest_stays():
    report = {
        "machine": {"cpu": "X", "cores": 2},
        "tokens": 12345,
        "cells": {"a": {"x": 1, "y": 0.123456}, "b": {"x": None, "z": "p|q"}},
        "runs": [{"n": 1}, {"n": 2}],
        "odd": [1, 2],
    }
    page = results.replace(PAGE, "One", results.section(report, "2026-01-02"))
    head, rest = page.split("and another.\n")
    assert head == PAGE.split("and another.\n")[0]
    assert rest.split("\n## Two")[1] == PAGE.split("\n## Two")[1]
    lines = rest.split("\n## Two")[0].split("\n")
    assert lines[1] == "2026-01-02: cpu X, cores 2."
    assert "| tokens | 12,345 |" in lines
    assert "| cells | x | y | z |" in lines
    assert "| a | 1 | 0.1235 |  |" in lines
    assert "| b |  |  | p\\|q |" in lines
    assert "| 2 | 2 |" in lines
    assert "|  | [1, 2] |" in lines
    assert "old" not in rest


def test_the_last_section_can_be_replaced_again():
    once = results.replace(PAGE, "Two", results.section([{"n": 1}], "2026-01-02"))
    again = results.replace(once, "Two", results.section([{"n": 7}], "2026-01-03"))
    assert again == results.replace(PAGE, "Two", results.section([{"n": 7}], "2026-01-03"))


def test_an_unknown_section_is_refused():
    with pytest.raises(ValueError, match="no section 'Three'"):
        results.replace(PAGE, "Three", "")
