"""ops/seer.sbatch without SLURM: what it asks for, and how it keeps a service running. `make slurm-test` runs it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seer.common.config import load

SCRIPT = Path(__file__).resolve().parents[2] / "ops" / "seer.sbatch"
TEXT = SCRIPT.read_text()
KEEP = "".join(re.findall(r"^(?:end|keep)\(\) \{\n.*?^\}\n", TEXT, re.MULTILINE | re.DOTALL))
SECONDS = 30


def bash(script, *arguments):
    return subprocess.Popen(
        ["bash", "-c", script, "bash", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_it_is_bash_and_wants_a_command():
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=SECONDS)
    found = subprocess.run(["bash", SCRIPT], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert (found.returncode, "give the command to run" in found.stderr) == (2, True)


def test_its_settings_are_settings():
    named = re.findall(r"\b(SEER_[A-Z]+__[A-Z_]+)=(\S*\$\(\([^)]*\)\)|\S*)", TEXT)
    assert len(named) >= 15
    environ = {}
    for name, text in named:
        text = re.sub(r"\$\(\(port \+ (\d)\)\)", lambda found: str(20000 + int(found[1])), text)
        environ[name] = (
            text.strip("'").replace("$head", "n1").replace("$port", "20000").replace("$keys", "/k")
        )
    config = load(None, environ)
    names = set(config.endpoints.__struct_fields__) - {"bind_host"}
    ports = [getattr(config.endpoints, name).rpartition(":")[2] for name in names]
    assert config.endpoints.bind_host == "*"
    assert sorted(ports) == [str(20000 + each) for each in range(7)]


@pytest.mark.parametrize("whole_group", [False, True], ids=["shell", "all"])
def test_a_service_is_told_to_drain_and_waited_for(whole_group, tmp_path):
    """SLURM signals the shell alone, or all processes."""
    program = tmp_path / "service"
    program.write_text(
        f"#!{sys.executable}\n"
        "import signal, time\n"
        "told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        "print('up', flush=True)\n"
        "while not told: time.sleep(0.05)\n"
        "time.sleep(0.5)\n"
        "print('drained', flush=True)\n"
    )
    program.chmod(0o755)
    process = subprocess.Popen(
        ["bash", "-c", f'{KEEP}keep "$@"', "bash", program, "engine"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "up\n"
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGTERM)
    said, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, said, errors) == (0, "drained\n", "")


def test_a_service_that_ends_is_started_again_and_given_up_at_last():
    process = bash(f"sleep() {{ :; }}\n{KEEP}keep sh -c 'echo started; exit 3'")
    said, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert said == "started\n" * 10
    assert errors.count("ended with status 3") == 10
    assert errors.endswith("is given up\n")


def test_a_service_that_does_not_drain_is_killed():
    """The pauses between looks are cut short, and the service ignores every SIGTERM."""
    script = f"""sleep() {{ command sleep 0.01; }}
{KEEP}keep bash -c 'trap "" TERM; echo up; while :; do command sleep 0.1; done'"""
    process = bash(script)
    assert process.stdout.readline() == "up\n"
    process.terminate()
    process.wait(timeout=SECONDS)
    process.stdout.close()
    process.stderr.close()
    assert process.returncode == 0
