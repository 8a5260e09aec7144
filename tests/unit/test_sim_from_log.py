"""`seer sim --from-log`: what it takes from a log, what it prints beside the real run, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orders
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from seer.cli.main import main
from seer.common.types import Capacity
from seer.services.buffer.events import Joined
from seer.services.buffer.log import rows
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.state import Limits
from seer.sim_command import from_log

STEP, ROW = 0.01, 0.002
CHUNK = 200
LENGTHS = ((400, 800), (1200, 1600))
CAPACITY = Capacity(kv_blocks=1000, block_size=16, max_num_seqs=8, max_model_len=4000)
HEADER = rows.Header(version="9.9", policy="divided", limits=Limits(2000), update_seconds=1, started=1e9)

Row = tuple[float, object, list[object]]


def rollout(
    name: str = "r",
    *,
    tokens: int = 1,
    drafted: int = 0,
    last: int = 2,
    read: float = 0.0,
    pause: float = 0.0,
) -> list[Row]:
    """Return the rows of all responses at once on one engine: `tokens` a step, of `drafted` ones and its own.

    Chunks are of 200 tokens; of the responses the first `last` groups end. A row takes `read` for each token
    of context, the first step `pause` as it computes prompts.
    """
    specs = [events.GroupSpec(str(number), 32) for number in range(len(LENGTHS))]
    submitted = events.GroupsSubmitted("t", name, 2, 2000, specs)
    lengths = {f"{name}/{g}#{i}": n for g, group in enumerate(LENGTHS) for i, n in enumerate(group)}
    sent = [instructions.Dispatch("e", key, number, 2000) for number, key in enumerate(lengths)]
    found: list[Row] = [(0.0, orders.joined("e", CAPACITY, 1), []), (0.0, submitted, sent)]
    now, rows_run, due = 0.0, 0, 0.0
    for step in range(max(lengths.values()) // tokens):
        running = [length for length in lengths.values() if length > step * tokens]
        if now >= due:
            counts = [rows_run * tokens, 0.0, 0.0, step, rows_run * drafted, rows_run * (tokens - 1)]
            found.append((now, events.EngineReported("e", 0, *counts, 96 * (step > 0)), []))
            due += 1.0
        now += pause * (step == 0) + STEP
        now += len(running) * (1 + drafted) * (ROW + read * (32 + step * tokens))
        rows_run += len(running)
        for number, (key, length) in enumerate(lengths.items()):
            made = (step + 1) * tokens
            attempt, over = number + 10 * step, made == length
            if made % CHUNK or made > length or (over and number >= 2 * last):
                continue
            before = number + 10 * (step - CHUNK // tokens) if made > CHUNK else number
            following = [] if over else [instructions.Dispatch("e", key, attempt, 2000)]
            found.append((now, orders.ended("e", key, before, CHUNK, "stop" * over), following))
    return found


def written(path: Path, *parts: Sequence[Row], header: rows.Header = HEADER) -> Path:
    """Write rollouts one after the other."""
    text, begin = rows.header_line(header), 0.0
    for part in parts:
        text += b"".join(rows.line(begin + time, event, out) for time, event, out in part)
        begin += part[-1][0] + 5.0
    path.write_bytes(text)
    return path


def sim(log: Path, *options: object) -> Result:
    return CliRunner().invoke(main, ["sim", "--workers", "1", "--from-log", str(log), *map(str, options)])


@pytest.mark.parametrize(
    ("tokens", "drafted", "read"), [(1, 0, 0.0), (2, 3, 0.0), (1, 0, 1e-5), (2, 3, 1e-6)]
)
def test_lengths_acceptance_and_times_of_steps_are_the_log_s(tmp_path, tokens, drafted, read):
    log = written(tmp_path / "log.jsonl", rollout(tokens=tokens, drafted=drafted, read=read))
    found = from_log.read_run(log, "")
    load = found.load
    assert load.lengths == LENGTHS
    assert (load.prompts, load.instances, load.cap, load.pool) == ((32, 32), 1, 2000, False)
    assert (load.model.kv_tokens, load.model.max_num_seqs) == (16000, 8)
    assert (load.model.step, load.model.request) == pytest.approx((STEP, ROW), rel=0.05)
    assert load.model.attend == pytest.approx(read, rel=0.05, abs=1e-7)
    assert load.dispatch < 0.1
    for each in load.acceptance:
        assert (each.tokens, each.drafted) == pytest.approx((tokens, drafted), rel=0.02)
    assert (found.variant.policy, found.variant.drafts, found.chunk_size) == ("divided", bool(drafted), 2000)


def test_a_token_of_a_prompt_takes_no_longer_than_a_row(tmp_path):
    model = from_log.read_run(written(tmp_path / "log.jsonl", rollout(pause=0.9)), "").load.model
    assert model.prefill == model.request > 0


def test_no_time_is_negative_and_all_add_up():
    work = np.array([[100, 100, 5e4, 0], [50, 100, 9e4, 300], [80, 160, 1e4, 10], [20, 90, 4e4, 0]], float)
    seconds = np.array([1.0, 0.9, 1.2, 0.4])
    times = from_log._fit(work, seconds)
    assert times.min() >= 0
    assert (work @ times).sum() == pytest.approx(seconds.sum())


def test_a_busy_machine_s_slow_seconds_change_the_level_alone():
    """Other work comes and goes while batches shrink, so it would look as if small batches were slow."""
    requests = np.linspace(64, 4, 60)
    true = 0.02 + 0.001 * requests
    busy = np.where(np.arange(60) % 3 == 0, np.linspace(1, 5, 60), 1.0)
    steps = 1 / (true * busy)
    times = from_log._fit(np.array([steps, steps * requests]).T, np.ones(60))
    assert times[0] / times[1] == pytest.approx(20, rel=0.3)
    assert times.tolist() == pytest.approx(np.array([0.02, 0.001]) * 60 / (steps * true).sum(), rel=0.2)


@pytest.mark.parametrize(("tokens", "drafted"), [(1, 0), (2, 3)])
def test_each_policy_s_end_stands_beside_the_real_one(tmp_path, tokens, drafted):
    log, report = (
        written(tmp_path / "log.jsonl", rollout(tokens=tokens, drafted=drafted)),
        tmp_path / "r.json",
    )
    result = sim(log, "--policies", "seer,divided", "--json", report)
    assert result.exit_code == 0, result.output
    label = "divided + drafts" if drafted else "divided"
    study = json.loads(report.read_text())["workloads"][0]
    real = study["real"]
    assert all(run["bound"] <= run["total"] for run in study["runs"])
    took = sum(400 // tokens * (STEP + ROW * running * (1 + drafted)) for running in (4, 3, 2, 1))
    assert real == {"label": label, "total": pytest.approx(took), "tail": 0.0}
    rows_shown = {line.split("│")[1].strip(): line for line in result.output.splitlines() if line[:1] == "│"}
    assert {"static", "seer", f"{label} (ran)"} <= rows_shown.keys()
    assert all(f" {took:.1f} (" in line for line in rows_shown.values())
    [line] = (line for line in result.output.splitlines() if line.startswith("the real run: "))
    told = line.removeprefix(f"the real run: {label} on 1 engines, {took:.1f} s; simulated ")
    assert abs(float(told.split("an error of ")[1].rstrip("%"))) < 2


def test_what_differs_is_an_option_or_in_a_file(tmp_path):
    """On two engines a group runs on each, so the second takes 1200 steps of two and 400 of one."""
    log, report = written(tmp_path / "log.jsonl", rollout()), tmp_path / "report.json"
    file = tmp_path / "two.toml"
    file.write_text("instances = 2\n")
    twice = tmp_path / "slow.toml"
    twice.write_text("instances = 2\n[model]\nstep = 0.02\n")
    for options, step in (
        (("--instances", 2), STEP),
        (("--workload", file), STEP),
        (("--workload", twice), 0.02),
    ):
        result = sim(log, *options, "--policy", "static", "--json", report)
        assert result.exit_code == 0, result.output
        runs = json.loads(report.read_text())["workloads"][0]["runs"]
        [found] = [run["total"] for run in runs if run["variant"]["policy"] == "static"]
        assert found == pytest.approx(1200 * (step + 2 * ROW) + 400 * (step + ROW), rel=0.02)
        assert "an error of" not in result.output


def test_the_report_has_a_line_about_the_best_other_policy(tmp_path, monkeypatch):
    log, out = written(tmp_path / "log.jsonl", rollout()), tmp_path / "report.html"
    command = ["report", str(log), "--out", str(out)]
    told = CliRunner().invoke(main, command).stderr
    assert "simulated: divided 24." in told
    assert "; the best other policy, " in told
    monkeypatch.setattr(from_log, "MOST_RESPONSES", 3)
    assert "simulated" not in CliRunner().invoke(main, command).stderr


def test_one_of_several_rollouts_is_chosen_and_what_ran_beside_is_named(tmp_path):
    second = [(time + 20, event, out) for time, event, out in rollout("b")[1:]]
    both = sorted([*rollout("a"), *second], key=lambda row: row[0])
    log = written(
        tmp_path / "log.jsonl",
        [row for row in both if not isinstance(row[1], events.EngineReported) or row[0] < 20],
    )
    result = sim(log, "--rollout", "a", "--policy", "seer")
    assert "a: 2 prompts" in result.output
    assert "left out: 8 chunks of other rollouts" in result.output
    refused = sim(log, "--rollout", "c")
    assert refused.exit_code == 2
    assert "--rollout = 'c': the log has 2 rollouts, the last ones: a, b" in refused.output


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"last": 1}, "--rollout = 'r': 2 of its 4 responses have no end in the log"),
        ({"drop": events.EngineReported}, "--from-log = '0 reports of steps': the log has no engine's steps"),
        ({"short": 5}, "it was too short: give a rollout of this release of 8 s or more"),
        ({"drop": events.GroupsSubmitted}, "was submitted before the log begins: give all files of the log"),
        ({"open": True}, "has turns, or prompts that came one by one: give a rollout that was submitted whole"),
        ({"drop": Joined}, "--from-log = 'e': joined before the log begins: give all files of the log"),
        ({"format": 1}, "has format 1 of version 9.9, this one reads 2: read it with the version that wrote it"),
        ({"policy": "gone"}, "--policy = 'gone': choose from"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused_with_the_field_and_the_fix(tmp_path, change, told):
    found = rollout(last=change.get("last", 2))
    if dropped := change.get("drop"):
        sent = [item for _, event, out in found if isinstance(event, dropped) for item in out]
        found = [row for row in found if not isinstance(row[1], dropped)]
        found[0][2].extend(sent)
    if seconds := change.get("short"):
        found = [row for row in found if row[0] < seconds or not isinstance(row[1], events.EngineReported)]
    if change.get("open"):
        found = [
            (time, replace(event, open=True) if hasattr(event, "open") else event, out)
            for time, event, out in found
        ]
    settings = {name: change[name] for name in ("format", "policy") if name in change}
    result = sim(written(tmp_path / "log.jsonl", found, header=replace(HEADER, **settings)))
    assert result.exit_code == 2
    assert told in result.output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--drafts",), "--drafts = True: the rollout had none"),
        (("--between", "0.5"), "--between = 0.5: r has recorded lengths: leave it out"),
        (("--workload", "moonlight"), "--workload = 'moonlight': with --from-log give .toml files"),
        (("--cluster", "moonlight", "--workload", "x.toml"), "and no --cluster"),
        (("--workload", "like.toml"), "like, trace: a recorded rollout has all of it: leave them out"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_a_log_are_refused(tmp_path, monkeypatch, options, told):
    monkeypatch.chdir(tmp_path)
    Path("like.toml").write_text('like = "moonlight"\n')
    result = sim(written(tmp_path / "log.jsonl", rollout()), *options)
    assert result.exit_code == 2
    assert told in result.output


def test_a_rollout_s_id_needs_a_log():
    result = CliRunner().invoke(main, ["sim", "--rollout", "r"])
    assert "--rollout = 'r': is of a log: give --from-log" in result.output
