"""The example of agents: the model learns to use the tool, and what it learnt needs the tool's own answers."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "agents"))

from lookup import agent, left_over, lookup, passes
from train_agents import verdict

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("iterations", [1, pytest.param(6, marks=pytest.mark.breadth)])
def test_the_tool_is_learnt_and_its_answers_are_what_counts(tmp_path, iterations):
    command = [sys.executable, EXAMPLE / "train_agents.py", f"--iterations={iterations}", "--out", tmp_path]
    ran = subprocess.run(
        [*command, "--set=pool.kind=none"], capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    trained = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    controls = json.loads((tmp_path / "controls.json").read_text())
    assert len(trained) == iterations
    assert list(controls) == ["own", "swapped", "none"]
    if iterations > 1:
        assert controls["own"] > trained[0]["held_out"] + 0.15
        assert "It learnt to use the tool" in ran.stdout
    assert f"{iterations}/{iterations}  reward" in ran.stdout
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert controls["swapped"] < 0.15
    assert controls["none"] < 0.15
    assert max(row["gap"] for row in trained) < 1e-5
    assert not any(row["corrected"] for row in trained)


@pytest.mark.parametrize(
    ("own", "swapped", "says"),
    [
        (
            0.9,
            0.05,
            "It learnt to use the tool: held-out pass rate 0.50 before and 0.90 after training; only",
        ),
        (0.55, 0.05, "Little was learnt"),
        (0.9, 0.6, "hardly by the tool"),
    ],
)
def test_the_verdict_follows_from_the_rates(own, swapped, says):
    assert says in verdict(0.5, {"own": own, "swapped": swapped, "none": 0.0})


@pytest.mark.parametrize(
    ("call", "left"),
    [
        ("S3 12 8 6 : 12 + 8", 6),
        ("8 - 12", 6),
        ("12 + 7", None),
        ("8 = 8", None),
        ("S3 12", None),
        ("12 + 12", None),
        ("", None),
    ],
)
def test_what_a_call_leaves(call, left):
    assert left_over((12, 8, 6), call) == left


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("S2 13 6 : 13 + 6 = 19", True),
        ("S2 13 6 : 6 + 13 = 19 19", True),
        ("S2 13 6 : 13 - 6 = 7", False),
        ("S2 13 6 : 13 + 6 = 20", False),
        ("S2 13 6 : 12 + 7 = 19", False),
        ("19", False),
        ("S2 13 6 : 13 + 6 =", False),
    ],
)
def test_which_answers_pass(answer, passed):
    assert passes(answer, 13, 6) == passed


def test_the_tool_has_an_answer_of_its_own_for_each_trajectory():
    found = [lookup("0/1", "train-000", index) for index in range(500)]
    assert set(found) == set(range(1, 21))
    assert found == [lookup("0/1", "train-000", index) for index in range(500)]
    assert found != [lookup("0/2", "train-000", index) for index in range(500)]


async def test_the_agent_goes_on_with_what_the_journal_has():
    said = []

    class Journalled:
        prompt_id, index, metadata = "train-000", 0, {"problem": SimpleNamespace(numbers=(12, 8, 6))}

        async def generate(self, **_):
            text = f"S2 {said[0]} 6 : {said[0]} + 6 = {int(said[0]) + 6}" if said else "S3 12 8 6 : 12 + 8"
            return SimpleNamespace(text=text, stop_reason="=")

        async def once(self, call):
            return await call("a call") + 20  # no number that the tool has

        def append(self, text):
            said.append(text)

    assert await agent(Journalled(), "0/1", 8, "own") == 1
    assert said == [str(lookup("0/1", "train-000", 0) + 20)]
