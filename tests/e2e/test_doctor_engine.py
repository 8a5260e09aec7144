"""`seer doctor` on a real engine: a healthy machine passes, and what is broken on purpose fails by name."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tiny_families import tiny

from seer.common.config import dump, load
from seer.doctor.checkup import CHECKS
from seer.doctor.runner import Check, run_checks

pytestmark = [pytest.mark.timeout(600)]

MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"
SECRET = "hf_0123456789abcdef"
ENGINE = "limits,start,largest-batch,step-table,sleep"

KILLED = """
import os
from seer.doctor import engine

def step_table(report):
    engine.started(report.config).backend.core.step = lambda: os.kill(os.getpid(), 9)
    engine.step_table(report)
"""


def doctor(folder, *options):
    """Run the command; return how it ended, the lines of each check, and the whole report."""
    file = folder / "doctor.json"
    command = [sys.executable, "-m", "seer.cli.main", "doctor", "--json", str(file), *options]
    environ = {**os.environ, "HF_TOKEN": SECRET, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=environ)
    report = json.loads(file.read_text())
    lines: dict[str, list[dict]] = {}
    for line in report["lines"]:
        lines.setdefault(line["check"], []).append(line)
    return done, lines, report


def its_folders(folder):
    """Return options that give a system folders and files below this one, for all that it writes."""
    its = {
        **{f"buffer.{name}": name for name in ("log", "spool", "images")}, "drafts.cache": "cache",
        "dgds.remember_path": "remembered", "pool.ssd_path": "disk",
    }  # fmt: skip
    return [*(f"--set={key}={folder / name}" for key, name in its.items()), "--set=pool.ssd_gib=1"]


def of(lines, status):
    return [
        (line["check"], line["text"]) for each in lines.values() for line in each if line["status"] == status
    ]


def test_an_engine_of_a_healthy_machine_is_ready(tmp_path):
    bundle = tmp_path / "bundle.tar.gz"
    its = tmp_path / "its"
    done, lines, report = doctor(tmp_path, "--only", ENGINE, "--bundle", str(bundle), *its_folders(its))
    assert (done.returncode, of(lines, "fail")) == (0, []), done.stdout + done.stderr
    assert report["verdict"]["state"] in ("ready", "slower")
    assert not its.exists()
    assert (report["shipped_model"], "the model of a checkout" in done.stdout) == (True, True)
    steps = {
        (line["figures"]["batch"], line["figures"]["drafts"])
        for line in lines["step-table"]
        if line["text"] == "step"
    }
    assert steps == {(batch, drafts) for batch in (1, 8, 64) for drafts in (0, 1, 2, 4, 8)}
    for line in lines["step-table"]:
        if line["text"] == "step":
            assert 0 < line["figures"]["seer_ms"] + line["figures"]["vllm_ms"] <= 1.5 * line["figures"]["ms"]
    (batch,) = [line["figures"] for line in lines["largest-batch"] if line["status"] == "pass"]
    assert batch["rows"] == 64 * 9
    assert [line["text"] for line in lines["sleep"] if line["status"] == "pass"] == [
        "sleep frees memory", "the same tokens after sleep", "the same tokens after level 2 and loading the same weights",
    ]  # fmt: skip
    with tarfile.open(bundle) as archive:
        parts = {member.name: archive.extractfile(member).read().decode() for member in archive}
    assert json.loads(parts["seer-doctor/doctor.json"])["verdict"] == report["verdict"]
    assert not [name for name, text in parts.items() if SECRET in text]


@pytest.mark.breadth
def test_the_whole_doctor_on_this_machine(tmp_path):
    ports = [f"--set=endpoints.{name}=tcp://127.0.0.1:0" for name in ("trainers", "engines")]
    done, lines, report = doctor(tmp_path, *ports, *its_folders(tmp_path / "its"))
    assert (done.returncode, of(lines, "fail")) == (0, []), done.stdout + done.stderr
    assert not (tmp_path / "its").exists()  # and no running system can be in its way there
    applying = {check.name for check in CHECKS} & set(lines)
    assert applying >= {
        "versions",
        "imports",
        "ports",
        "bits",
        "start",
        "same-tokens",
        "pool",
        "other-kernels",
    }
    assert "streams" not in lines  # without a GPU
    cells = [line["figures"]["cell"] for line in lines["same-tokens"] if line["status"] == "pass"]
    assert cells[0] == "chunk-16"
    assert cells[1] in ("drafts", "drafts-random")
    keys = {f"{each['section']}.{each['key']}" for each in report["verdict"]["settings"]}
    assert {"engine.max_num_seqs", "shared.block_size", "drafts.source"} <= keys


@pytest.mark.breadth
@pytest.mark.ranks
def test_data_parallel_ranks_start_and_what_looks_into_one_process_is_left_out(tmp_path):
    model = tmp_path / "model"
    tiny("qwen3-moe").save_pretrained(model)
    shutil.copy(MODEL / "tokenizer.json", model)
    ranks = "--model", str(model), "--set=engine.vllm.data_parallel_size=2", "--set=engine.max_model_len=256"
    done, lines, _ = doctor(tmp_path, "--only", ENGINE + ",pool", *ranks)
    assert (done.returncode, of(lines, "fail")) == (0, []), done.stdout + done.stderr
    assert "2 data-parallel ranks start, and give the same tokens twice" in dict(of(lines, "pass"))["start"]
    assert {check for check, _ in of(lines, "skip")} == {"largest-batch", "step-table", "sleep", "pool"}
    done, lines, _ = doctor(tmp_path, "--only", "start", *ranks, "--set=engine.tensor_parallel=2")
    assert "engine.tensor_parallel = 2: " in dict(of(lines, "fail"))["start"]


@pytest.mark.breadth
def test_a_damaged_model_fails_by_name_and_no_check_of_it_is_begun(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    done, lines, report = doctor(tmp_path, "--only", ENGINE + ",same-tokens,pool", "--model", str(model))
    assert (done.returncode, report["verdict"]["state"]) == (1, "not ready")
    failed = dict(of(lines, "fail"))
    assert str(model) in failed["start"]
    for name in ("largest-batch", "step-table", "sleep", "same-tokens", "pool"):
        assert "start" in failed[name]


@pytest.mark.breadth
def test_an_engine_that_is_killed_in_the_step_table_leaves_the_others_judged(tmp_path, monkeypatch):
    (tmp_path / "killed_engine.py").write_text(KILLED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = tmp_path / "seer.toml"
    config.write_text(dump(load(None, {}, [f"shared.model={MODEL}"])))
    known = {check.name: check for check in CHECKS}
    table = Check("step-table", "killed_engine:step_table", 60, "engine", needs="start")
    lines = list(run_checks([known["start"], table, known["sleep"]], 400, str(config)))
    (failed,) = [line for line in lines if line.status == "fail"]
    assert (failed.check, "signal 9" in failed.text) == ("step-table", True)
    assert ("sleep", "pass") in {(line.check, line.status) for line in lines}
