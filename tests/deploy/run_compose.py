"""`make compose-test`: builds the images, runs a head and two nodes, kills a node in the middle of a rollout.

What must hold: all services become healthy; a client on a network of its own gets every response exactly once,
and the same tokens as in a run that nothing disturbed; the gateway chats over HTTP with who has a key; every process
has a key, and a stranger's endless message and questions are cut off; every container has a limit of memory.

Head, nodes and client are compose projects and a container of their own, as on machines of their own; each node
and the client share with the head one internal network, and nothing with each other. Environment: DOCKER (the
client; default: the first on PATH that has BuildKit), BASE_IMAGE (default: python:3.11-slim where it can be pulled,
else a Debian made by debootstrap).
"""

import json
import os
import subprocess

import support
from support import MODEL, PROMPTS, REPO, CannotRun, run, say, until

IMAGE = "python:3.11-slim"
PULL_SECONDS = 120
HEALTHY_SECONDS = 900  # engine.load_seconds
ROLLOUT_SECONDS = 600
NAME = f"seer-test-{os.getpid()}"
NETWORKS = ["client", "node1", "node2"]
CONTAINER_USER = 10001


def docker(*command, **options):
    return run(support.docker(), *command, **options).stdout.strip()


def check_docker():
    """Return the compose command."""
    say(f"docker client: {support.docker()}")
    try:
        docker("info", seconds=30)
    except subprocess.CalledProcessError as error:
        raise CannotRun("no docker daemon answers: start dockerd, or the docker service") from error
    try:
        docker("compose", "version")
    except subprocess.CalledProcessError:
        return [support.need("docker-compose", "docker-compose")]
    return [support.docker(), "compose"]


def base_image():
    """Return an image to build on: the one asked for, the usual one, or one made here."""
    if asked := os.environ.get("BASE_IMAGE"):
        return asked
    try:
        docker("pull", IMAGE, seconds=PULL_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        say(f"{IMAGE} cannot be pulled: making a base image with debootstrap")
    else:
        return IMAGE
    name = f"seer-test-base:{support.SUITE}"
    if not docker("images", "-q", name):
        docker("import", support.base_archive(), name)
    return name


def build(folder):
    """Build the targets `core` and `cpu` from wheels that this machine's pip found."""
    base = base_image()
    with support.served(support.wheels()) as url:
        (folder / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {url}\n")
        for target in ("core", "cpu"):
            say(f"docker build: target {target}")
            docker(
                "build", "--network", "host", "--build-arg", f"BASE_IMAGE={base}", "--secret",
                f"id=pip,src={folder / 'pip.conf'}", "-f", REPO / "compose" / "Dockerfile",
                "--target", target, "-t", f"seer:{target}", REPO,
                seconds=1800, env=support.BUILDKIT,
            )  # fmt: skip


class Projects:
    """The head and the nodes; everything made is removed at the end."""

    def __init__(self, compose, folder):
        self.compose = compose
        self.folder = folder
        self.names = ["head", "node1", "node2"]
        (folder / "seer.toml").write_text(support.configuration("/models/model"))
        self.keys = support.keys(folder / "keys", CONTAINER_USER)
        self.environ = os.environ | {
            "SEER_CONFIG": str(folder / "seer.toml"),
            "SEER_KEYS": str(self.keys),
            "SEER_MODELS": str(MODEL.parent),
            "SEER_HEAD": "",
            "COMPOSE_FILE": "",
        }
        for name in self.names:
            (folder / f"{name}.yaml").write_text(json.dumps(self._overlay(name)))

    def _overlay(self, name):
        joined = NETWORKS if name == "head" else [name]
        services = ["buffer", "context", "dgds", "exporter", "gateway"] if name == "head" else ["engine"]
        return {
            "services": {service: {"networks": joined} for service in services},
            "networks": {network: {"external": True, "name": f"{NAME}-{network}"} for network in joined},
        }

    def __enter__(self):
        for network in NETWORKS:
            docker("network", "create", "--internal", f"{NAME}-{network}")
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            for name in self.names:
                print(self(name, "logs", "--tail=40").stdout)
        for name in self.names:
            self(name, "down", "--volumes", "--timeout", "10")
        for network in NETWORKS:
            docker("network", "rm", f"{NAME}-{network}")

    def __call__(self, name, *command):
        """Run a compose command in one project."""
        profiles = ["head", "metrics", "gateway"] if name == "head" else ["node"]
        files = ["-f", REPO / "compose" / "compose.yaml", "-f", self.folder / f"{name}.yaml"]
        return run(
            *self.compose, *files, "-p", f"{NAME}-{name}",
            *(word for profile in profiles for word in ("--profile", profile)), *command, env=self.environ,
        )  # fmt: skip

    def containers(self, name):
        return self(name, "ps", "-q").stdout.split()

    def healthy(self, *names):
        query = ["inspect", "--format", "{{.State.Health.Status}}"]
        return all(
            docker(*query, container) == "healthy"
            for name in names or self.names
            for container in self.containers(name)
        )


def client(folder, out, keys):
    """Return the command of a client in a container of its own."""
    return [
        support.docker(), "run", "--rm", "--network", f"{NAME}-client", "--name", f"{NAME}-client",
        "-v", f"{keys}/trainer-run.key:/key:ro", "-v", f"{keys}/public:/keys:ro",
        "-e", "SEER_SECURITY__KEY=/key", "-e", "SEER_SECURITY__SERVER=/keys/server.pub",
        "-v", f"{MODEL}:/model:ro", "-v", f"{PROMPTS}:/prompts.jsonl:ro", "-v", f"{folder}:/out",
        "seer:core", *map(str, support.rollout("/model", "/prompts.jsonl", f"/out/{out}", "tcp://buffer:7101")),
    ]  # fmt: skip


def rollouts(projects, folder):
    """Run an undisturbed and a disturbed rollout and compare them."""
    outs = folder / "out"
    outs.mkdir()
    outs.chmod(0o777)  # the client's user is not ours
    say("rollout without disturbance")
    run(*client(outs, "reference.jsonl", projects.keys), seconds=ROLLOUT_SECONDS)
    say("rollout with a node killed in the middle")
    victims = projects.containers("node1")  # asked for later, the rollout would go on meanwhile
    command = client(outs, "out.jsonl", projects.keys)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            support.first_groups(outs / "out.jsonl", ROLLOUT_SECONDS)
            docker("kill", *victims)
            done = support.groups_done(outs / "out.jsonl")
            assert process.poll() is None, f"the rollout was over too soon:\n{process.stdout.read()}"
            say(f"node1 was killed after {done} of 64 groups")
            said, _ = process.communicate(timeout=ROLLOUT_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert done < 64
    head = projects.containers("head")[0]
    status = json.loads(docker("exec", head, "seer", "status", "--json", "--connect", "tcp://buffer:7101"))
    assert len(status["buffer"]["instances"]) == 1
    assert status["buffer"]["counters"]["lost"] > 0, "the killed node ran nothing"
    responses, tokens = support.check_same(outs / "out.jsonl", outs / "reference.jsonl")
    say(
        f"{responses} responses, {tokens} tokens: each once, same as undisturbed; "
        f"{status['buffer']['counters']['lost']} chunks were lost and run again"
    )


def metrics():
    """The exporter, with an observer's key, tells who asks over HTTP of both engines."""
    script = "import urllib.request as r; print(r.urlopen('http://exporter:7112/metrics', timeout=30).read().decode())"
    told = docker(
        "run", "--rm", "--network", f"{NAME}-client", "--entrypoint", "python", "seer:core", "-c", script
    )
    assert 'seer_engines{state="serving"} 2.0' in told, told
    assert "seer_up 1.0" in told


def chat(projects):
    """A chat goes through the gateway and its jobs."""
    answer = docker(
        "run", "--rm", "--network", f"{NAME}-client", "-v", f"{projects.keys}:/keys:ro", "--entrypoint", "python",
        "seer:core", "-c", support.CHAT, "http://gateway:7110", "/keys",
    )  # fmt: skip
    status, text = answer.split(" ", 1)
    assert status == "401", answer
    say(f"the gateway refuses who has no key, and answers who has one: {text!r}")


def strangers(projects):
    """Without a key, or with a wrong one, nobody gets in, and a message of endlessly many parts takes nothing."""
    everything = [each for name in ("head", "node2") for each in projects.containers(name)]
    for container in everything:
        assert int(docker("inspect", "--format", "{{.HostConfig.Memory}}", container)) > 0
    script = REPO / "tests" / "deploy" / "flood.py"
    sent = docker(
        "run", "--rm", "--network", f"{NAME}-client", "-v", f"{script}:/flood.py:ro", "--entrypoint", "python",
        "seer:core", "/flood.py", "dgds", 7107,
    )  # fmt: skip
    assert int(sent) < 16, f"it took {sent} MiB"
    asked = subprocess.run(
        [support.docker(), "run", "--rm", "--network", f"{NAME}-client", "seer:core", "status", "--connect",
         "tcp://buffer:7101"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert asked.returncode == 1, asked.stdout
    assert "keys are used at one end alone" in asked.stdout + asked.stderr
    told = ["inspect", "--format", "{{.RestartCount}} {{.State.Status}}"]
    for container in everything:
        assert docker(*told, container) == "0 running"
    say(f"a stranger's message was cut off after {sent} MiB, and its questions were refused")


def test():
    compose = check_docker()
    with support.scratch() as folder:
        build(folder)
        with Projects(compose, folder) as projects:
            for name in projects.names:
                projects(name, "up", "-d", "--no-build")
            say("waiting until all containers are healthy")
            until("healthy containers", HEALTHY_SECONDS, projects.healthy, pause=2.0)
            metrics()
            chat(projects)
            rollouts(projects, folder)
            strangers(projects)
    say("passed")


if __name__ == "__main__":
    support.main(test)
