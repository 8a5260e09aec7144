"""`make systemd-test`: boots the units in a tree of their own, kills a service and freezes another.

What must hold: all units become active, hardened as their files say; the gateway chats over HTTP with who has a
key; an engine killed in the middle of a rollout is started again by systemd and the rollout ends with the tokens
of an undisturbed one; a frozen service is noticed by its watchdog, killed and started again; a rollout works
afterwards; stopping the target ends everything in order.

The tree is a Debian made by debootstrap, booted by systemd-nspawn with a network of its own.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import support
from support import MODEL, PROMPTS, REPO, CannotRun, run, say, until

UNITS = ["seer-buffer", "seer-context", "seer-dgds", "seer-engine@0", "seer-gateway"]
READY_SECONDS = 300
ROLLOUT_SECONDS = 600
WATCHDOG_SECONDS = 5
"""Instead of the units' own 30, so that the test need not wait so long."""


def check_tools():
    need = {"debootstrap": "debootstrap", "systemd-nspawn": "systemd-container", "nsenter": "util-linux"}
    for tool, package in need.items():
        support.need(tool, package)
    if os.geteuid() != 0:
        raise CannotRun("systemd-nspawn has to run as root")


def install(tree, wheels):
    """Install Seer, its units, a model and a configuration into the tree."""
    say("installing into the tree")
    run("tar", "-C", tree, "-xf", support.base_archive())
    wheel = tree.parent / "wheel"
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", wheel, REPO)
    locks = [part for lock in ("core", "cpu") for part in ("-r", f"/src/requirements/{lock}.lock")]
    built = f"/wheel/{next(wheel.iterdir()).name}"
    pip = [
        "/opt/seer/bin/pip",
        "install",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--find-links",
        "/wheels",
    ]
    binds = [f"--bind-ro={REPO}:/src", f"--bind-ro={wheels}:/wheels", f"--bind-ro={wheel}:/wheel"]
    for command in (
        ["python3", "-m", "venv", "/opt/seer"],
        [*pip, "--require-hashes", *locks],
        [*pip, "-r", "/src/requirements/torch-cpu.lock", built],
        ["/opt/seer/bin/seer", "keys", "init", "/etc/seer/keys"],
        [
            "/opt/seer/bin/seer",
            "keys",
            "add",
            "/etc/seer/keys",
            "engine:*",
            "trainer:run",
            "gateway:http",
            "http:agents",
        ],
        ["env", "ALLOW=10.0.0.0/8", "sh", "/src/compose/systemd/install.sh", "head", "gateway", "node", "0"],
    ):
        run("systemd-nspawn", "-q", "--register=no", "--keep-unit", "-D", tree, *binds, "--", *command)
    shutil.copytree(MODEL, tree / "srv" / "model")
    shutil.copy(PROMPTS, tree / "srv" / "prompts.jsonl")
    (tree / "etc" / "seer" / "seer.toml").write_text(support.configuration("/srv/model"))
    for unit in ("seer-context.service.d", "seer-dgds.service.d"):
        folder = tree / "etc" / "systemd" / "system" / unit
        folder.mkdir(parents=True)
        (folder / "test.conf").write_text(f"[Service]\nWatchdogSec={WATCHDOG_SECONDS}\n")


class Machine:
    """The booted tree."""

    def __init__(self, tree):
        self.tree = tree
        self.log = tree.parent / "console.log"

    def __enter__(self):
        say("booting the tree")
        with self.log.open("wb") as log:
            self.nspawn = subprocess.Popen(
                ["systemd-nspawn", "-D", self.tree, "--register=no", "--keep-unit", "--private-network", "-b"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            self.leader = until("a booted tree", 60, self._leader)
            # Not "running" yet: that waits for the engine.
            until(
                "systemd",
                60,
                lambda: self.systemctl("is-system-running") in ("starting", "running", "degraded"),
            )
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            print(self("journalctl", "--no-pager", "-n", "80", check=False).stdout)
        self._end()

    def _end(self):
        self.nspawn.terminate()  # it has the tree's init shut down
        try:
            self.nspawn.wait(60)
        except subprocess.TimeoutExpired:
            self.nspawn.kill()
            self.nspawn.wait(60)

    def _leader(self):
        """Return the process id of the tree's init."""
        if self.nspawn.poll() is not None:
            raise AssertionError(f"systemd-nspawn ended:\n{self.log.read_text()}")
        children = Path(f"/proc/{self.nspawn.pid}/task/{self.nspawn.pid}/children").read_text().split()
        names = {int(child): Path(f"/proc/{child}/comm").read_text().strip() for child in children}
        return next((child for child, name in names.items() if name == "systemd"), None)

    def command(self, *command):
        return [
            "nsenter",
            "-t",
            str(self.leader),
            "-m",
            "-u",
            "-i",
            "-n",
            "-p",
            "-r",
            "-w",
            "--",
            *map(str, command),
        ]

    def __call__(self, *command, check=True, seconds=60):
        return subprocess.run(
            self.command(*command), capture_output=True, text=True, check=check, timeout=seconds
        )

    def systemctl(self, *command):
        return self("systemctl", *command, check=False).stdout.strip()

    def show(self, unit, key):
        return self.systemctl("show", "--value", "-p", key, f"{unit}.service")

    def state(self, unit):
        return self.show(unit, "ActiveState"), int(self.show(unit, "NRestarts"))

    def rollout(self, out):
        return self.command(
            "env",
            "SEER_SECURITY__KEY=/etc/seer/keys/trainer-run.key",
            "SEER_SECURITY__SERVER=/etc/seer/keys/public/server.pub",
            "/opt/seer/bin/seer",
            *support.rollout("/srv/model", "/srv/prompts.jsonl", f"/srv/{out}", "tcp://127.0.0.1:7101"),
        )


def check_hardening(machine):
    """Assert that what the units ask for holds in the processes; say what this machine's kernel leaves out."""
    for unit in UNITS:
        assert machine.show(unit, "MemoryMax") not in ("infinity", ""), unit
        allowed = set(machine.show(unit, "IPAddressAllow").split())  # systemd 252 tells them in any order
        assert allowed == {"127.0.0.0/8", "::1/128", "10.0.0.0/8"}, (unit, allowed)
        proc = f"/proc/{machine.show(unit, 'MainPID')}"
        status = dict(line.split(":\t", 1) for line in machine("cat", f"{proc}/status").stdout.splitlines())
        assert (status["Seccomp"], status["NoNewPrivs"], int(status["CapBnd"], 16)) == ("2", "1", 0), status
        owner = machine("readlink", f"{proc}/ns/user").stdout
        assert owner != machine("readlink", "/proc/1/ns/user").stdout, f"{unit} shares the machine's users"
        mounts = machine("cat", f"{proc}/mounts").stdout
        limited = any("subset=pid" in line for line in mounts.splitlines() if line.split()[1] == "/proc")
        assert limited is (unit in ("seer-context", "seer-dgds")), (unit, mounts)
    assert machine.show("seer-buffer", "MemoryDenyWriteExecute") == "yes"
    journal = machine("journalctl", "--no-pager").stdout
    for missing in ("BPF/cgroup firewalling", "SocketBind"):
        lines = [line for line in journal.splitlines() if missing in line and "not" in line]
        say(f"{missing}: {lines[0] if lines else 'nothing said against it'}")


def chat(machine):
    """A chat goes through the gateway and its jobs, which lower their priority and bound their memory."""
    answer = machine(
        "/opt/seer/bin/python", "-c", support.CHAT, "http://127.0.0.1:7110", "/etc/seer/keys", seconds=120
    )
    status, text = answer.stdout.split(" ", 1)
    assert status == "401", answer.stdout
    say(f"the gateway refuses who has no key, and answers who has one: {text.strip()!r}")


def kill_an_engine(machine):
    """SIGKILL the only engine in the middle of a rollout: systemd brings it back, the rollout ends."""
    out = machine.tree / "srv" / "killed.jsonl"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        machine.rollout(out.name), stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            support.first_groups(out, ROLLOUT_SECONDS)
            machine("systemctl", "kill", "-s", "KILL", "--kill-whom=main", "seer-engine@0.service")
            done, killed = support.groups_done(out), time.monotonic()
            assert process.poll() is None, f"the rollout was over too soon:\n{process.stdout.read()}"
            until(
                "the engine's return", READY_SECONDS, lambda: machine.state("seer-engine@0") == ("active", 1)
            )
            say(f"engine killed after {done} of 64 groups: ready again in {time.monotonic() - killed:.0f} s")
            said, _ = process.communicate(timeout=ROLLOUT_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert done < 64


def freeze(machine, unit):
    """SIGSTOP a service: its watchdog must end it, and systemd start it again."""
    machine("systemctl", "kill", "-s", "STOP", "--kill-whom=main", f"{unit}.service")
    frozen = time.monotonic()
    until(f"{unit}'s return", READY_SECONDS, lambda: machine.state(unit) == ("active", 1))
    journal = machine("journalctl", "--no-pager", "-u", unit).stdout
    assert "Watchdog timeout" in journal, journal
    say(f"{unit} frozen: its watchdog brought it back in {time.monotonic() - frozen:.0f} s")


def stop(machine):
    """Stop the target; every unit must end by itself, within its time."""
    machine("systemctl", "stop", "seer.target")
    states = ("active", "deactivating")
    until("the end of all units", 120, lambda: not any(machine.state(unit)[0] in states for unit in UNITS))
    ends = {unit: (machine.state(unit)[0], machine.show(unit, "Result")) for unit in UNITS}
    assert set(ends.values()) == {("inactive", "success")}, ends


def test():
    check_tools()
    with support.scratch() as folder:
        tree = folder / "tree"
        tree.mkdir()
        install(tree, support.wheels())
        with Machine(tree) as machine:
            say("waiting until all units are active")
            until(
                "active units",
                READY_SECONDS,
                lambda: {machine.state(unit) for unit in UNITS} == {("active", 0)},
            )
            check_hardening(machine)
            asked = machine("/opt/seer/bin/seer", "status", "--connect", "tcp://127.0.0.1:7101", check=False)
            assert asked.returncode == 1
            assert "keys are used at one end alone" in asked.stdout + asked.stderr
            chat(machine)
            say("rollout without disturbance")
            run(*machine.rollout("reference.jsonl"), seconds=ROLLOUT_SECONDS)
            kill_an_engine(machine)
            freeze(machine, "seer-dgds")
            say("rollout after all that")
            run(*machine.rollout("after.jsonl"), seconds=ROLLOUT_SECONDS)
            for name in ("killed.jsonl", "after.jsonl"):
                responses, tokens = support.check_same(tree / "srv" / name, tree / "srv" / "reference.jsonl")
                say(f"{name}: {responses} responses, {tokens} tokens, same as undisturbed")
            stop(machine)
    say("passed")


if __name__ == "__main__":
    support.main(test)
