"""What compares runs under faults with an undisturbed one: each difference is told, and a plan without faults."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "matplotlib")):
    pytest.skip("needs the engine extra and matplotlib", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "bench" / "correctness"))

import same_curve
import same_weights
import torch

OPTIONS: dict[str, Any] = {
    "example": "agents",
    "iterations": 2,
    "prompts": 8,
    "max_tokens": 128,
    "learning_rate": 4e-4,
    "bfloat16": False,
    "faults": 6,
    "pause": 8.0,
    "plant_fault": False,
    "cut_off": False,
}
RESPONSES = [[[[5, 6, 7], 1.0], [[5, 9], 0.0]], [[[8, 6], 0.0], [[4], 0.0]]]
"""Of each step: tokens, those that a tool said among them, and reward."""


def ran(out: Path, change: str = "", **told: Any) -> None:
    """Write what a run leaves; with `change`, one thing is another."""
    out.mkdir(parents=True)
    responses = json.loads(json.dumps(RESPONSES))
    if change == "token":
        responses[1][0][0][1] += 1
    if change == "length":
        responses[1][0][0].append(3)
    if change == "reward":
        responses[0][1][1] = 1.0
    rows = [{"weights_digest": f"of {step}", "reward": 0.5} for step in range(2)]
    rows[1]["weights_digest"] += " changed" * (change == "weights")
    for step, row in enumerate(responses):
        (out / f"responses-{step}.json").write_text(json.dumps(row))
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "controls.json").write_text(json.dumps({"own": 0.4 + (change == "controls")}))
    moment = torch.ones(2) + (change == "optimizer")
    state = {"model": {"w": torch.zeros(2)}, "optimizer": {"state": {0: {"exp_avg": moment}}}}
    torch.save(state, out / "checkpoint.pt")
    names = same_weights.RUNS_FOLLOW_FROM + same_weights.PLANS_FOLLOW_FROM * (out.name != "quiet")
    known = {"faults": ["kill engine-0"], "at_steps": [1], "packets_cut": 0, "problems": [], **told}
    asked = {name: OPTIONS[name] for name in names}
    (out / "run.json").write_text(json.dumps({"asked": asked, **same_weights.results(out), **known}))


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def compared(*more: str) -> tuple[int, dict[str, Any]]:
        given = ["--example=agents", "--iterations=2", "--plans=1", f"--out={tmp_path}", *more]
        monkeypatch.setattr(sys, "argv", ["same_weights.py", *given])
        code = same_weights.main()
        return code, json.loads(capsys.readouterr().out)["plans"][0]

    return compared


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ("token", "iteration 1, response 0, token 1"),
        ("length", "iteration 1, response 0, token 2"),
        ("reward", "iteration 0, response 1, reward 1.0 instead of 0.0"),
        ("weights", "no token differs"),
        ("controls", "no token differs"),
        ("optimizer", "no token differs"),
    ],
)
def test_what_differs_is_told(tmp_path: Path, compared: Any, change: str, first: str) -> None:
    ran(tmp_path / "quiet")
    ran(tmp_path / "plan-0", change)
    code, plan = compared()
    assert (code, plan["same"]) == (1, False)
    assert plan["first"].startswith(first)


@pytest.mark.parametrize(
    ("told", "code"), [({}, 0), ({"faults": [], "at_steps": []}, 1), ({"problems": ["a process is left"]}, 1)]
)
def test_an_equal_plan_counts_if_it_had_faults_and_left_nothing(
    tmp_path: Path, compared: Any, told: dict[str, Any], code: int
) -> None:
    ran(tmp_path / "quiet")
    ran(tmp_path / "plan-0", **told)
    assert compared()[0] == code
    assert "first" not in compared()[1]


def test_a_plan_that_cut_no_packet_off_does_not_count(
    tmp_path: Path, compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_weights, "problem", lambda: "")
    monkeypatch.setitem(OPTIONS, "cut_off", True)
    ran(tmp_path / "quiet")
    ran(tmp_path / "plan-0")
    ran(tmp_path / "plan-1", packets_cut=12)
    assert [compared("--cut-off", f"--seed={seed}")[0] for seed in (0, 1)] == [1, 0]


def test_the_picture_marks_each_kind_of_fault(tmp_path: Path) -> None:
    run = {"digests": ["abc"], "rewards": [0.1, 0.2], "faults": ["cut engine-0 for 2 s"], "at_steps": [1]}
    quiet = {**run, "faults": [], "at_steps": []}
    same_curve.draw({"undisturbed": quiet, "plan 0": run}, tmp_path / "curve.svg")
    picture = (tmp_path / "curve.svg").read_text()
    assert "node cut off" in picture
    assert "kill of" not in picture
