"""A fixed part of the fuzzing of files; `python tests/process/fuzz_files.py --cases N --seed S` does more."""

from __future__ import annotations

from process.fuzz_files import fuzz

CASES = 12_000


def test_every_file_is_read_or_refused_by_a_named_error() -> None:
    report = fuzz(CASES, seed=0)
    assert report["harm"] == {}, report["harm"]
    assert report["cases"] >= CASES
    assert all(seen["read"] for seen in report["kinds"].values())
