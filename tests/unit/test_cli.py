"""The command line: exit codes, what options become, what is imported for --help."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import seer
from seer.cli.main import main
from seer.common.policy.tail import tail_seconds
from seer.common.types import SamplingParams
from seer.rollout import job as rollout_job
from seer.rollout.job import Job

PROMPT = '{"id": "a", "prompt_token_ids": [1, 2, 3]}\n'


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPT)
    return path


def seer_rollout(prompts: Path, *options: object) -> Result:
    command = ["rollout", str(prompts), "--out", str(prompts.parent / "out.jsonl"), *map(str, options)]
    return CliRunner().invoke(main, command)


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from seer.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(sorted({'numpy', 'zmq', 'msgspec', 'rich', 'torch', 'asyncio', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("[]\n")
    for command in ("rollout", "up", "status", "replay", "sim", "buffer", "context", "dgds", "engine"):
        assert f"\n  {command} " in result.stdout


def test_no_service_and_no_engine_is_imported_for_a_rollout() -> None:
    script = (
        "import sys, seer.rollout.job\n"
        "print([m for m in sys.modules if m.startswith('seer.services') or m in ('torch', 'vllm', 'uvloop')])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(("imported", "apart"), [("vllm", ""), ("something", "taken apart\n")])
def test_a_command_that_imported_vllm_does_not_take_its_modules_apart(imported: str, apart: str) -> None:
    script = (
        "import sys\n"
        "class Kept:\n"
        "    def __del__(self): print('taken apart')\n"
        f"sys.modules[{imported!r}], sys.argv = Kept(), ['seer', 'verify']\n"
        "from seer.cli.main import run; run()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, apart)
    assert "Missing argument" in result.stderr


def test_version_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert seer.__version__ == project["version"]
    assert seer.__version__ in CliRunner().invoke(main, ["--version"]).output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "--model = '': give a Hugging Face model folder"),
        (["--backend", "replay", "--top-p", "0"], "sampling.top_p = 0.0: must be in"),
        (["--backend", "replay", "--stop", ""], "sampling.stop = ('',)"),
        (["--backend", "replay", "--policy", "nonsense"], "--policy = 'nonsense': choose one of "),
        (["--backend", "replay", "--chunk-size", "0"], "Invalid value for '--chunk-size'"),
        (["--backend", "replay", "--instances", "0"], "Invalid value for '--instances'"),
        (["--connect", "ipc:///none", "--report-html", "/tmp/r.html"], "`seer report` draws it"),
        (["--backend", "replay", "--drafts", "siblings"], "Invalid value for '--drafts'"),
        (["--backend", "replay", "--max-draft", "0"], "0 is not in the range 1<=x<=128"),
        (["--backend", "replay", "--max-draft", "129"], "Invalid value for '--max-draft'"),
        (
            ["--backend", "replay", "--set", "drafts.max_draft=0"],
            "drafts.max_draft = 0: give a whole number from 1 to 128",
        ),
        (["--backend", "nonsense"], "Invalid value for '--backend'"),
    ],
)
def test_bad_input_is_exit_code_2(prompts: Path, options: list[str], told: str) -> None:
    result = seer_rollout(prompts, *options)
    assert result.exit_code == 2, result.output
    assert told in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("sim --plan", "nan"),
        ("sim --between", "nan"),
        ("spans --oldest", "nan"),
        ("doctor --seconds", "nan"),
        ("verify x --logprob-tolerance", "nan"),
        ("config check x --gpu-gib", "nan"),
        ("config check x --gpu-gib", "inf"),
        ("config check x --disk", "inf"),
    ],
)
def test_what_is_no_number_is_refused(command: str, value: str) -> None:
    result = CliRunner().invoke(main, [*command.split(), value])
    assert result.exit_code == 2, result.output
    assert f"Invalid value for '{command.split()[-1]}'" in result.output


@pytest.mark.parametrize("option", ["--out", "--report", "--report-html"])
def test_prompts_and_responses_are_not_written_over(prompts: Path, option: str) -> None:
    file = prompts if option == "--out" else prompts.parent / "out.jsonl"
    result = seer_rollout(prompts, "--backend", "replay", option, file)
    assert result.exit_code == 2, result.output
    assert (
        f"{option} = {str(file)!r}: is what {'PROMPTS' if option == '--out' else '--out'} names"[:80]
        in result.output
    )
    assert prompts.read_text() == PROMPT


def test_a_run_s_name_follows_from_its_file_whatever_bytes_name_it() -> None:
    names = [os.fsdecode(name) for name in (b"out.jsonl", b"\xff.jsonl", b"\xfe.jsonl")]
    jobs = [types.SimpleNamespace(out=Path("/x") / name) for name in names]
    assert len({rollout_job._name_of(job, {}) for job in jobs}) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_a_disk_that_fills_is_no_traceback(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code), "lines.json.part")

    monkeypatch.setattr("seer.doctor.checkup.run", fails)
    result = CliRunner().invoke(main, ["doctor", "--json", str(tmp_path / "lines.json")])
    assert result.exit_code == 1
    assert os.strerror(code) in result.output
    assert "lines.json.part" in result.output


def test_nobody_to_connect_to_is_exit_code_1(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_job, "CONNECT_SECONDS", 0.1)
    result = seer_rollout(prompts, "--connect", f"ipc://{prompts.parent}/none", "--policy", "divided")
    assert result.exit_code == 1, result.output
    assert "did not answer within 0.1 s" in result.output
    assert "options have no effect" in result.output
    assert not (prompts.parent / "out.jsonl").exists()


def test_options_become_a_job(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(rollout_job, "perform", lambda job: jobs.append(job) or 0)
    (tmp_path / "seer.toml").write_text("[buffer]\nchunk_size = 64\n[engine]\nmax_num_seqs = 3\n")
    monkeypatch.setenv("SEER_ENGINE__KV_BLOCKS", "99")
    result = seer_rollout(
        prompts, "--model", tmp_path, "-n", 3, "--max-tokens", 9, "--temperature", 0.5, "--top-p", 0.9,
        "--top-k", 40, "--seed", 5, "--rollout-number", 6, "--instances", 4, "--tensor-parallel", 2,
        "--max-num-seqs", 7, "--stop", "x", "--stop", "y", "--config", tmp_path / "seer.toml",
        "--set", "engine.kv_blocks=48", "--drafts", "own", "--max-draft", 5, "--max-paths", 2,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (job,) = jobs
    assert job.sampling == SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=40, stop=("x", "y"), logprobs="scaled"
    )
    assert (job.n, job.seed, job.rollout_number, job.instances) == (3, 5, 6, 4)
    config = job.config
    assert (config.buffer.chunk_size, config.engine.max_num_seqs) == (64, 7)
    assert (config.engine.kv_blocks, config.engine.tensor_parallel) == (48, 2)
    assert (config.drafts.source, config.drafts.max_draft, config.drafts.max_paths) == ("own", 5, 2)
    assert Path(config.shared.model) == job.model == tmp_path


def test_defaults_are_those_of_the_contract(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(rollout_job, "perform", lambda job: jobs.append(job) or 0)
    assert seer_rollout(prompts, "--model", prompts.parent).exit_code == 0
    (job,) = jobs
    assert job.sampling == SamplingParams(max_tokens=512, temperature=1.0, top_p=1.0, top_k=0)
    assert (job.n, job.seed, job.rollout_number, job.instances, job.connect) == (8, 0, None, None, "")
    assert (job.config.engine.tensor_parallel, job.config.buffer.chunk_size) == (1, None)
    drafts = job.config.drafts
    assert (drafts.source, drafts.max_draft, drafts.max_paths) == ("grouped", 8, None)


@pytest.mark.parametrize(
    ("times", "tail"),
    [([], 0.0), ([2.0], 0.0), ([float(t) for t in range(1, 11)], 1.0), ([1.0] * 18 + [2.0, 9.0], 8.0)],
)
def test_the_tail_is_the_last_tenth(times: list[float], tail: float) -> None:
    assert tail_seconds(times) == tail
    assert tail_seconds(times[::-1]) == tail


def test_status_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seer.cli import status

    monkeypatch.setattr(status, "CONNECT_SECONDS", 0.1)
    result = CliRunner().invoke(main, ["status", "--connect", f"ipc://{tmp_path}/none"])
    assert result.exit_code == 1
    assert json.dumps("did not answer")[1:-1] in result.output
