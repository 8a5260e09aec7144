"""`make slurm-test`: ops/seer.sbatch on a real SLURM of three nodes, with replay engines.

What must hold: a rollout runs through keys made for the job, a stranger without one is refused, engines are on
all nodes, a killed engine and a killed buffer come back with the same tokens; the end drains engines and takes
the keys away; the command's exit status is the job's; a cancelled job, and one at its time limit, drain, too;
a port that is taken ends the job with a reason.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import slurm_cluster
import support
from slurm_cluster import Cluster
from support import REPO, say, until

SCRIPT = REPO / "ops" / "seer.sbatch"
SEER = Path(sys.executable).with_name("seer")
NODES = ["n1", "n2", "n3"]
ENGINES = [f"{node}-{local}" for node in NODES for local in (0, 1)]
PYTHON = "python"
"""What a service is run by, and not the shell that keeps it."""
READY_SECONDS = 120
END_SECONDS = 240
TOML = """
[buffer]
chunk_size = 64
[engine]
backend = "replay"
[engine.replay]
step_seconds = 0.02
"""
ROLLOUT = (
    'exec {seer} rollout {folder}/prompts.jsonl --connect "$SEER_ENDPOINTS__TRAINERS" --out {out} '
    "-n 8 --max-tokens {tokens} --ignore-eos"
)


class Jobs:
    """Submits jobs of the script to a cluster; each has its folder in the cluster's."""

    def __init__(self, cluster):
        self.cluster, self.folder = cluster, cluster.folder
        (self.folder / "seer.toml").write_text(TOML)
        prompts = [json.dumps({"id": str(i), "prompt_token_ids": [1, 2, i]}) for i in range(16)]
        (self.folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")

    def submit(self, name, command, *options, **environ):
        """Return a job's number and its folder."""
        folder = self.folder / name
        environ = self.cluster.environ | {
            "SEER": str(SEER), "SEER_TOML": str(self.folder / "seer.toml"), "SEER_JOB": str(folder),
        } | environ  # fmt: skip
        asked = ["--nodes=3", "--ntasks-per-node=2", f"--output={self.folder}/{name}.out", *options]
        answer = self.cluster.run(
            "sbatch", "--parsable", *asked, SCRIPT, "sh", "-c", command, env=environ, cwd=self.folder
        )
        return answer.stdout.strip(), folder

    def rollout(self, name, *options, tokens=1280, **environ):
        out = self.folder / f"{name}.jsonl"
        command = ROLLOUT.format(seer=SEER, folder=self.folder, out=out, tokens=tokens)
        return *self.submit(name, command, *options, **environ), out

    def ended(self, job, seconds=END_SECONDS):
        """Wait for a job's end; return its state and exit code."""
        busy = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        until(f"the end of job {job}", seconds, lambda: self.cluster.state(job)[0] not in busy)
        return self.cluster.state(job)

    def status(self, job, key="", server="", check=True):
        port = 20000 + int(job) % 1500 * 8
        named = {"SEER_SECURITY__KEY": str(key), "SEER_SECURITY__SERVER": str(server)} if key else {}
        return self.cluster.run(
            SEER, "status", "--json", "--connect", f"tcp://n1:{port}", node="n2", check=check,
            env=self.cluster.environ | named,
        )  # fmt: skip

    def instances(self, job, folder):
        """Return the engines that the buffer gives work, as an observer sees them."""
        keys = folder / "keys"
        asked = self.status(job, keys / "observer-run.key", keys / "public" / "server.pub", check=False)
        buffer = json.loads(asked.stdout or "{}").get("buffer") or {"instances": []}
        return sorted(each["name"] for each in buffer["instances"])  # other nodes do not reach the context


def returned(jobs, text, count, old):
    now = jobs.cluster.pids(text, PYTHON)
    return len(now) == count and old not in now


def tokens(file):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 16
    return [[each["token_ids"] for each in line["responses"]] for line in lines]


def drained(folder):
    """Assert that each engine was told to drain, and did."""
    for number in range(len(ENGINES)):
        log = (folder / f"engine-{number}.log").read_text()
        assert log.count("drained") == 1, f"{folder}/engine-{number}.log:\n{log}"
        assert "stopping at once" not in log, log
    assert not (folder / "keys").exists()
    assert (folder.stat().st_mode & 0o777) == 0o700


def undisturbed(jobs):
    job, folder, out = jobs.rollout("reference")
    assert jobs.ended(job) == ("COMPLETED", "0:0"), (jobs.folder / "reference.out").read_text()
    drained(folder)
    say("a rollout by six engines on three nodes, drained, keys gone")
    return out


def killed(jobs, reference):
    """Kill an engine and the buffer; strangers ask meanwhile."""
    job, folder, out = jobs.rollout("killed")
    until("all engines", READY_SECONDS, lambda: jobs.instances(job, folder) == ENGINES)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder / "keys").glob("*.key")}
    assert modes, "no keys"
    assert set(modes.values()) == {0o600}, modes
    stranger = jobs.status(job, check=False)
    assert stranger.returncode == 1
    assert "keys are used at one end alone" in stranger.stdout + stranger.stderr
    foreign = support.keys(jobs.folder / "foreign", 0)
    other = jobs.status(
        job, foreign / "trainer-run.key", folder / "keys" / "public" / "server.pub", check=False
    )
    assert other.returncode == 1
    assert "does not admit" in other.stdout + other.stderr, other.stdout + other.stderr
    for service, count in (("engine", len(ENGINES)), ("buffer", 1)):
        text = f"{SEER} {service} --config"
        before = jobs.cluster.pids(text, PYTHON)
        assert len(before) == count, before
        assert jobs.cluster.state(job)[0] == "RUNNING", "the rollout was over too soon"
        os.kill(before[0], signal.SIGKILL)
        until(
            f"a new {service}",
            READY_SECONDS,
            lambda text=text, count=count, old=before[0]: returned(jobs, text, count, old),
        )
        say(f"{service} killed: it is back")
    assert jobs.ended(job) == ("COMPLETED", "0:0"), (jobs.folder / "killed.out").read_text()
    assert tokens(out) == tokens(reference)
    say("strangers refused; engine and buffer killed: the same tokens")


def exit_status(jobs):
    job, folder = jobs.submit("status", "exit 7")
    assert jobs.ended(job) == ("FAILED", "7:0")
    assert not (folder / "keys").exists()
    say("the command's exit status is the job's")


def cancelled(jobs, name, *how):
    """End a job in the middle of a rollout: its engines hand back, its buffer has what they had."""
    job, folder, _ = jobs.rollout(name, tokens=8000)
    until("all engines", READY_SECONDS, lambda: jobs.instances(job, folder) == ENGINES)
    jobs.cluster.run("scancel", *how, job)
    state, _ = jobs.ended(job)
    until("no process", READY_SECONDS, lambda: not jobs.cluster.pids(f"{SEER} ", PYTHON))
    drained(folder)
    assert any((folder / "log").iterdir())
    say(f"scancel {' '.join(how)}: engines drained, job {state}")


def taken_port(jobs):
    """Something listens at the head's port: the job ends and its log says why."""
    port = 20000
    holder = subprocess.Popen(
        jobs.cluster.command("n1", sys.executable, "-m", "http.server", "--bind", "0.0.0.0", port),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        job, folder = jobs.submit("taken", "sleep 600", SEER_PORT=str(port))
        state = jobs.ended(job)
    finally:
        holder.kill()
        holder.wait()
    assert state[0] == "FAILED", state
    log = (folder / "buffer.log").read_text()
    assert "another process listens there" in log, log
    assert "given up" in log, log
    say("a port that is taken: the job fails and says why")


def test():
    slurm_cluster.check_tools()
    with support.scratch() as folder:
        folder.chmod(0o755)
        with Cluster(folder, NODES) as cluster:
            jobs = Jobs(cluster)
            reference = undisturbed(jobs)
            killed(jobs, reference)
            exit_status(jobs)
            cancelled(jobs, "asked", "--batch", "--signal=TERM")
            cancelled(jobs, "cancelled")
            taken_port(jobs)
    say("passed")


if __name__ == "__main__":
    support.main(test)
