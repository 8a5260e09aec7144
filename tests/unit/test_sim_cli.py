"""`seer sim`: what it prints, writes and refuses."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import BinaryIO

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from seer.cli.main import main
from seer.sim.study import Run, Summary, Task, Variant, run_all, summarize, tasks, variants
from seer.sim.workload import WORKLOADS, Workload
from seer.sim_command import job as sim_job

TINY = 'like = "moonlight"\ninstances = 2\ngroups = 6\ngroup_size = 4\ncap = 300\nmean = 80\nprompt = 16\n'


def sim(*options: object) -> Result:
    return CliRunner().invoke(main, ["sim", "--workers", "1", *map(str, options)])


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY + "[model]\nkv_tokens = 2000\n")
    return path


def test_a_log_appears_whole_or_not_at_all(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(task: Task, file: BinaryIO) -> Run:
        file.write(b"half a log")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sim_job, "perform_one", full)
    result = sim("--workload", tiny, "--log", tmp_path / "log.jsonl")
    assert result.exit_code == 2, result.output
    assert "cannot be written: No space left on device; give a file on a disk with room" in result.output
    assert [each.name for each in tmp_path.iterdir()] == ["tiny.toml"]


def test_a_table_has_a_row_for_each_policy_and_the_report_the_same_figures(
    tiny: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    result = sim("--workload", tiny, "--policy", "divided,oracle", "--drafts", "--seeds", 2, "--json", report)
    assert result.exit_code == 0, result.output
    assert "tiny.toml: 6 prompts, 24 responses on 2 instances; chunks of 256, 2 seeds" in result.output
    [found] = json.loads(report.read_text())["workloads"]
    labels = [each["label"] for each in found["policies"]]
    assert labels == ["static", "divided", "oracle", "static + drafts", "divided + drafts", "oracle + drafts"]
    rows = [line.split("│")[1:-1] for line in result.output.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == labels
    for row, each in zip(rows, found["policies"], strict=True):
        summary = each["summary"]
        assert float(row[1].split()[0]) == pytest.approx(summary["total"], abs=0.51)
        assert float(row[3].split()[0]) == pytest.approx(summary["speedup"]["mean"], abs=0.0051)
        assert float(row[5].strip(" %")) == pytest.approx(100 * summary["efficiency"], abs=0.051)
    assert len(found["runs"]) == 12
    assert result.stderr.count("tiny.toml: ") == 12
    assert "tiny.toml: 12/12 runs, oracle + drafts, seed 1: " in result.stderr
    assert found["responses"] == 24
    assert "paper" not in result.output


def test_the_report_says_how_many_steps_of_ranks_are_dummies(tmp_path: Path) -> None:
    path, report = tmp_path / "ranks.toml", tmp_path / "report.json"
    path.write_text('like = "kimi-k2"\ninstances = 1\ngroups = 2\nranks = 32\n')
    result = sim("--workload", path, "--policy", "seer", "--seeds", 1, "--json", report)
    assert result.exit_code == 0, result.output
    for run in json.loads(report.read_text())["workloads"][0]["runs"]:
        assert 0.5 < run["counts"]["dummies"] < 1, "16 responses have 32 ranks"


def test_responses_with_turns_have_columns_of_their_own(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert "computed" not in sim("--workload", tiny, "--policy", "seer", "--seeds", 1).output
    tiny.write_text("turns = 3\ntool_tokens = 20\ntool_seconds = 5\n" + tiny.read_text())
    result = sim("--workload", tiny, "--policy", "seer", "--seeds", 2, "--json", report)
    assert result.exit_code == 0, result.output
    [heading] = [line for line in result.output.splitlines() if line.startswith("┃")]
    assert [cell.strip() for cell in heading.split("┃")[-4:-1]] == ["computed", "pulled", "idle"]
    seer = json.loads(report.read_text())["workloads"][0]["policies"][1]["summary"]
    row = next(line for line in result.output.splitlines() if line.startswith("│ seer"))
    found = [float(cell.strip(" %")) for cell in row.split("│")[-4:-1]]
    expected = [seer["computed_tokens"] / 1e6, seer["pulled_tokens"] / 1e6, 100 * seer["idle"]]
    assert found == pytest.approx(expected, abs=0.051)
    assert seer["idle"] > 0.1


def test_all_policies_are_compared_unless_told_otherwise(tiny: Path) -> None:
    result = sim("--workload", tiny, "--seeds", 1)
    assert result.exit_code == 0, result.output
    for policy in sim_job.POLICIES:
        assert f"│ {policy} " in result.output


@pytest.mark.parametrize("policy", [policy for policy in sim_job.POLICIES if policy != "oracle"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_rollout_s_log_is_answered_the_same_by_a_buffer_s_machines(
    tiny: Path, tmp_path: Path, policy: str, drafts: bool
) -> None:
    log = tmp_path / "log.jsonl"
    options = ("--workload", tiny, "--policy", policy, "--log", log)
    result = sim(*options, *["--drafts"] * drafts)
    assert result.exit_code == 0, result.output
    assert result.output.endswith(f"seed 0: {log}\n")
    before = log.read_bytes()
    assert sim(*options, *["--drafts"] * drafts).exit_code == 0
    assert log.read_bytes() == before
    replayed = CliRunner().invoke(main, ["replay", str(log)])
    assert replayed.exit_code == 0, replayed.output
    lines = replayed.output.splitlines()
    assert lines[0].startswith("simulated tiny.toml, by version ")
    assert re.fullmatch(r"  1 rollouts, \d+ rows, \d+\.\d s, 2 engines", lines[1])
    assert lines[2] == "  the same answers"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--policy", "oracle"), "no buffer knows what oracle does"),
        (("--workload", "qwen2-vl-72b,moonlight"), "is of one rollout: give one --workload"),
    ],
)
def test_what_has_no_log_is_refused(tiny: Path, tmp_path: Path, options: tuple[str, str], told: str) -> None:
    result = sim("--workload", tiny, *options, "--log", tmp_path / "log.jsonl")
    assert result.exit_code == 2
    assert "--log = " in result.output
    assert told in result.output
    assert not (tmp_path / "log.jsonl").exists()


def test_group_size_and_between_change_what_is_drawn(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = sim("--workload", tiny, "--policy", "static", "--seeds", 1, "--group-size", 8, "--between", 0, "--json", report)  # fmt: skip
    assert result.exit_code == 0, result.output
    load = json.loads(report.read_text())["workloads"][0]["workload"]
    assert (load["groups"], load["group_size"], load["between"]) == (3, 8, 0)


def test_a_trace_runs_once_on_the_cluster_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"id": "a", "length": 50}\n{"id": "a", "length": 10}\n{"id": "b", "length": 1}\n')
    result = sim("--workload", trace, "--cluster", "kimi-k2", "--policy", "seer")
    assert result.exit_code == 0, result.output
    assert (
        "trace.jsonl: 2 prompts, 3 recorded responses on 8 instances; chunks of 1536, 1 seed "
        in result.output
    )
    described = tmp_path / "my [bold]own.toml"  # no markup
    described.write_text(TINY.replace("mean = 80", 'mean = 0\ntrace = "trace.jsonl"'))
    report = tmp_path / "report.json"
    result = sim("--workload", described, "--policy", "seer", "--json", report)
    assert result.exit_code == 0, result.output
    assert "my [bold]own.toml: 2 prompts" in result.output
    [found] = json.loads(report.read_text())["workloads"]
    assert (found["responses"], [run["tokens"] for run in found["runs"]]) == (3, [61, 61])
    assert "lengths" not in found["workload"]
    refused = sim("--workload", trace, "--cluster", "kimi-k2", "--between", 0.5)
    assert refused.exit_code == 2
    assert "--between = 0.5: trace.jsonl has recorded lengths: leave it out" in refused.output


def test_beside_the_papers_workloads_stand_its_figures() -> None:
    job = sim_job.Job(workloads=(), cluster=None, policies=(), group_size=None, between=None, chunk_size=64, drafts=False, seeds=1, workers=1, json_file=None, plot=None, plan=None)  # fmt: skip
    load = WORKLOADS["qwen2-vl-72b"]()
    found = _summaries(load)
    table = sim_job.table_of(load, found, job)
    columns = {str(column.header): list(column.cells) for column in table.columns[:3]}
    error = found[0].total / 3957 - 1
    assert columns["paper s"] == [f"3957 ({error:+.0%})", ""]


def _summaries(load: Workload) -> list[Summary]:
    small = replace(load, groups=2, mean=50.0, cap=200)
    runs = run_all(list(tasks(small, variants(["divided"], False), 1, 64)), 1, lambda run: None)
    return summarize(runs, Variant("static"))


def test_a_plan_says_how_many_instances(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = sim("--workload", tiny, "--plan", 100, "--seeds", 1, "--json", report)
    assert result.exit_code == 0, result.output
    assert result.stderr.endswith(" s on 1\n")
    assert "tiny.toml: within 100 s with seer: 1 of its instances (" in result.stdout
    [found] = json.loads(report.read_text())["workloads"]
    assert (found["instances"], found["policy"], list(found["tried"])) == (1, "seer", ["1"])
    assert sim("--workload", tiny, "--plan", 0.1, "--seeds", 1).exit_code == 2


def test_plots_are_drawn(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "deep" / "plots"
    result = sim("--workload", tiny, "--policy", "divided", "--drafts", "--seeds", 1, "--plot", folder)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in folder.iterdir()) == [
        "tiny-completion.png", "tiny-instances.png", "tiny-tail.png",
    ]  # fmt: skip
    for path in folder.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


def test_without_matplotlib_it_says_what_to_install(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = sim("--workload", tiny, "--plot", tmp_path / "plots")
    assert result.exit_code == 2
    assert "plots need matplotlib: pip install 'seer-rollout[plot]'" in result.output
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--policy", "static,sear"], "--policy = 'sear': choose from seer, "),
        (["--workload", "sunlight"], "--workload = 'sunlight': choose from moonlight, "),
        (["--group-size", "0"], "Invalid value for '--group-size'"),
        (["--between", "1.5"], "Invalid value for '--between'"),
        (["--plan", "0"], "Invalid value for '--plan'"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
        (["--json", "/nonexistent/report.json"], "--json = '/nonexistent/report.json': No such file or directory; give a file in an"),
    ],
)  # fmt: skip
def test_bad_input_is_exit_code_2_before_anything_runs(
    options: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_job, "run_all", lambda *_: pytest.fail("something ran"))
    result = sim(*options)
    assert result.exit_code == 2, result.output
    assert told in result.output
