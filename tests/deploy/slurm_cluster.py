"""A SLURM cluster on this machine: a controller and nodes, each in a network namespace with a name of its own.

Nothing of it is visible outside: the daemons are children of the test, the namespaces are joined by a bridge
in one more, and all files lie in one folder. Needs root, and Debian's slurmctld, slurmd, slurm-client, munge.
"""

import contextlib
import os
import subprocess
import time
from pathlib import Path

from support import CannotRun, need, run, until

PACKAGES = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge", "ip": "iproute2",
    "nsenter": "util-linux",
}  # fmt: skip

CONFIGURATION = """
ClusterName=seer
SlurmctldHost={controller}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/{track}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=30
MinJobAge=600
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def check_tools():
    for tool, package in PACKAGES.items():
        need(tool, package)
    if os.geteuid() != 0:
        raise CannotRun("network namespaces and SLURM's daemons need root")


class Cluster:
    """`names`: the nodes; the first also runs the controller. `track`: how SLURM finds a job's processes."""

    def __init__(self, folder, names, cpus=2, track="linuxproc"):
        self.folder, self.names, self.cpus, self.track = folder, names, cpus, track
        self.environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._prefix = f"seer{os.getpid()}-"
        self._daemons = {}

    def __enter__(self):
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            self._join()
            self._configure()
            self._munge()
            (self.folder / "controller").mkdir(mode=0o700)
            self._start("controller", self.names[0], "slurmctld", "-D")
            for name in self.names:
                self._start(name, name, "slurmd", "-D", "-N", name)
            until("idle nodes", 60, lambda: self.run("sinfo", "-h", "-o", "%t").stdout.split() == ["idle"])
            undo.pop_all()
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            for name in ("controller", *self.names):
                print((self.folder / f"{name}.log").read_text()[-1000:])
        self._end()

    def command(self, node, *command):
        """Return a command that runs on a node."""
        into = [
            "nsenter",
            f"--net=/run/netns/{self._prefix}{node}",
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
        ]
        script = f'mount --bind {self.folder}/hosts /etc/hosts && hostname {node} && exec "$@"'
        return [*into, script, "sh", *map(str, command)]

    def run(self, *command, check=True, seconds=60, node=None, **options):
        """Run a command on a node, by default the controller's."""
        return subprocess.run(
            self.command(node or self.names[0], *command),
            timeout=seconds, check=check, **{"env": self.environ, "capture_output": True, "text": True} | options,
        )  # fmt: skip

    def state(self, job):
        """Return a job's state and exit code, e.g. `("COMPLETED", "0:0")`."""
        shown = self.run("scontrol", "show", "-o", "job", job).stdout
        words = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        return words["JobState"], words["ExitCode"]

    def pids(self, text, program=""):
        """Return the processes of this cluster's jobs whose command line has `text`, run by `program`."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
                if line and text in " ".join(line) and Path(line[0]).name.startswith(program):
                    environ = (entry / "environ").read_bytes()
                    if f"SLURM_CONF={self.folder}/slurm.conf".encode() in environ:
                        found.append(int(entry.name))
        return found

    def _join(self):
        switch = f"{self._prefix}switch"
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(self.names, 1):
            space = f"{self._prefix}{name}"
            run("ip", "netns", "add", space)
            run(
                "ip",
                "-n",
                switch,
                "link",
                "add",
                name,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            run("ip", "-n", switch, "link", "set", name, "master", "switch", "up")
            run("ip", "-n", space, "address", "add", f"10.78.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", space, "link", "set", device, "up")

    def _configure(self):
        at = {name: f"10.78.0.{number}" for number, name in enumerate(self.names, 1)}
        lines = [f"{address} {name}" for name, address in at.items()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs={self.cpus} State=UNKNOWN"
            for name, address in at.items()
        )
        first = self.names[0]
        text = CONFIGURATION.format(
            controller=first, address=at[first], folder=self.folder, track=self.track, nodes=nodes
        )
        (self.folder / "slurm.conf").write_text(text)

    def _munge(self):
        folder = self.folder / "munge"
        folder.mkdir(mode=0o755)
        key = folder / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "seed-file": "seed",
            "log-file": "log",
        }
        options = [f"--{name}={folder / file}" for name, file in files.items()]
        self._daemons["munged"] = subprocess.Popen(
            ["munged", "--foreground", "--force", *options], stderr=(folder / "stderr").open("wb")
        )
        until("munged", 10, (folder / "socket").exists, pause=0.1)

    def _start(self, daemon, node, *command):
        self._daemons[daemon] = subprocess.Popen(
            self.command(node, *command), env=self.environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _end(self):
        if "controller" in self._daemons and self._daemons["controller"].poll() is None:
            with contextlib.suppress(subprocess.SubprocessError):
                self.run("scancel", "--user=root", check=False)
                time.sleep(1)
        for pid in self.pids(""):
            if pid not in (os.getpid(), *(each.pid for each in self._daemons.values())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        for process in reversed(self._daemons.values()):
            process.kill()
            process.wait()
        for name in (*self.names, "switch"):
            subprocess.run(["ip", "netns", "del", f"{self._prefix}{name}"], check=False, capture_output=True)
