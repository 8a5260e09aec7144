"""What `make compose-test` and `make systemd-test` share: a base system, wheels, and rollouts to compare.

Nothing here needs an image registry: the base system comes from debootstrap, the wheels from pip as it is
configured on this machine. Both are kept in build/deploy.
"""

import contextlib
import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
KEPT = REPO / "build" / "deploy"
LOCKS = [REPO / "requirements" / f"{name}.lock" for name in ("core", "build", "cpu", "dev")]
TORCH = REPO / "requirements" / "torch-cpu.lock"
VISION = REPO / "requirements" / "install_torchvision.py"
MODEL = REPO / "examples" / "countdown" / "model"
PROMPTS = REPO / "examples" / "countdown" / "prompts.jsonl"
RESPONSES, MAX_TOKENS = 4, 96

SUITE = "bookworm"
PACKAGES = (
    "ca-certificates,dbus,g++,libcurl4,libibverbs1,libnuma1,"
    "python3,python3-dev,python3-pip,python3-venv,systemd,systemd-sysv"
)
PYTHON = (3, 11)
"""What the suite has; the lock files must be made for it, so `make` must use the same."""


CHAT = """
import json, pathlib, sys, urllib.error, urllib.request
url, keys = sys.argv[1:]
chat = {"model": "model", "messages": [{"role": "user", "content": "10 8 5 > 13"}], "max_tokens": 16}
asked = urllib.request.Request(url + "/v1/chat/completions", json.dumps(chat).encode())
asked.add_header("Content-Type", "application/json")
try:
    refused = urllib.request.urlopen(asked, timeout=60).status
except urllib.error.HTTPError as error:
    refused = error.code
asked.add_header("Authorization", "Bearer " + (pathlib.Path(keys) / "http-agents.key").read_text().split()[1])
answer = json.load(urllib.request.urlopen(asked, timeout=60))
print(refused, answer["choices"][0]["message"]["content"])
"""
"""A program: the status of a chat without a key, and the answer to a chat with one."""

BUILDKIT = os.environ | {"DOCKER_BUILDKIT": "1"}


class CannotRun(Exception):  # noqa: N818 - reads as what it says
    """The machine lacks something; the text says what."""


def main(test):
    """Run a test; exit with one line when it cannot run here."""
    try:
        test()
    except CannotRun as error:
        sys.exit(f"cannot run: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed: {error}\n{error.stdout or ''}\n{error.stderr or ''}")


def need(tool, package):
    """Return the tool's path."""
    found = shutil.which(tool)
    if found is None:
        raise CannotRun(f"{tool} is not installed (Debian: apt-get install {package})")
    return found


@functools.cache
def docker():
    """Return the docker client: DOCKER, or the first on PATH that can build with BuildKit.

    Several may be installed: newer ones need a plugin for that, older ones have it built in.
    """
    asked = os.environ.get("DOCKER")
    folders = [None] if asked else os.get_exec_path()
    found = [path for folder in folders if (path := shutil.which(asked or "docker", path=folder))]
    for client in found:
        try:
            run(client, "build", "--help", seconds=30, env=BUILDKIT)
        except (subprocess.SubprocessError, OSError):
            continue
        return client
    if found:
        raise CannotRun(f"no BuildKit: {', '.join(found)} lacks it; install docker-buildx or docker.io")
    raise CannotRun(
        f"{asked or 'docker'} is not installed (Debian: apt-get install docker.io docker-compose)"
    )


def say(text):
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def run(*command, seconds=600, **options):
    """Run a command to its end; its output is shown only if it fails."""
    command = [str(part) for part in command]
    return subprocess.run(
        command, check=True, timeout=seconds, **{"capture_output": True, "text": True} | options
    )


def until(what, seconds, condition, pause=1.0):
    """Poll until `condition()` is true; return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(pause)
    return value


def base_archive():
    """Return a tar file of a small Debian with systemd, Python and a compiler."""
    archive = KEPT / f"{SUITE}.tar"
    if archive.exists():
        return archive
    need("debootstrap", "debootstrap")
    if os.geteuid() != 0:
        raise CannotRun("debootstrap has to run as root")
    say(f"debootstrap {SUITE}")
    with scratch() as folder:
        tree = folder / "tree"
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, tree, seconds=1800)
        run("tar", "-C", tree, "-cf", folder / "tar", ".")
        (folder / "tar").rename(archive)
    return archive


def wheels():
    """Return a folder with a wheel of every pinned requirement."""
    if sys.version_info[:2] != PYTHON:
        raise CannotRun(
            f"make this with Python {PYTHON[0]}.{PYTHON[1]}, as {SUITE} has: make PYTHON=python3.11"
        )
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in (*LOCKS, TORCH, VISION))).hexdigest()
    folder = KEPT / "wheels"
    stamp = folder / ".complete"
    if not stamp.exists() or stamp.read_text() != digest:
        say("pip download of all pinned requirements")
        shutil.rmtree(folder, ignore_errors=True)
        (version,) = re.findall(r'^VERSION = "(.*)"$', VISION.read_text(), re.MULTILINE)
        for wanted in (
            ["--require-hashes", *(part for lock in LOCKS for part in ("-r", lock))],
            ["-r", TORCH, f"torchvision=={version}"],
        ):
            run(sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, *wanted, seconds=1800)
        stamp.write_text(digest)
    return folder


@contextlib.contextmanager
def served(folder):
    """Serve a folder on this machine's loopback; yields its URL."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextlib.contextmanager
def scratch():
    """Yield a folder that is gone afterwards; in build/, where there is room for whole systems."""
    KEPT.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=KEPT))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def configuration(model):
    """Return a seer.toml for the shipped model: small engines, chunks short enough to move often."""
    return f"""
[shared]
model = "{model}"

[buffer]
chunk_size = 32

[engine]
kv_blocks = 512
max_num_seqs = 32
max_model_len = 512
"""


def keys(folder, user):
    """Make keys for the services, engines of any name and a trainer, for a user's id; return the folder."""
    seer = Path(sys.executable).with_name("seer")
    for command in (
        ["init", folder],
        ["add", folder, "engine:*", "observer:*", "trainer:run", "gateway:http", "http:agents"],
    ):
        run(seer, "keys", *command)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user)
    return folder


def rollout(model, prompts, out, *more):
    """Return the arguments of `seer` for the rollout that every test runs."""
    return [
        "rollout", prompts, "--model", model, "--out", out, "-n", RESPONSES,
        "--max-tokens", MAX_TOKENS, "--ignore-eos", "--connect", *more,
    ]  # fmt: skip


def groups_done(out):
    """Return how many groups a rollout that still runs has finished."""
    journal = Path(f"{out}.journal")
    return max(0, len(journal.read_bytes().splitlines()) - 1) if journal.exists() else 0


def first_groups(out, seconds):
    """Wait until a rollout has finished something, as soon as it has: all groups end at about the same time."""
    return until("the first groups", seconds, lambda: groups_done(out), pause=0.1)


def check_same(out, reference):
    """Assert that each prompt has all its responses, once, with the tokens of the reference; count them."""
    prompts = [json.loads(line)["id"] for line in PROMPTS.read_text().splitlines()]
    tables = []
    for file in (out, reference):
        lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
        assert [line["id"] for line in lines] == prompts, f"{file}: other prompts than were asked for"
        assert all(len(line["responses"]) == RESPONSES for line in lines)
        tables.append([[each["token_ids"] for each in line["responses"]] for line in lines])
    flat = [tokens for group in tables[0] for tokens in group]
    assert all(len(tokens) == MAX_TOKENS for tokens in flat)
    assert tables[0] == tables[1], "the disturbed run has other tokens than the undisturbed one"
    return len(flat), sum(map(len, flat))
