"""Bad input to the real commands: one clear line, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from living import living

from seer.common.config import Endpoints

SEER = (sys.executable, "-m", "seer.cli.main")
ANOTHER_MAJOR = (
    sys.executable, "-c",
    "import seer.common.wire.version as v; v.MAJOR += 1\nfrom seer.cli.main import main; main()",
)  # fmt: skip
REPLAY = ("--backend", "replay")
QUICK = ("-n", "1", "--max-tokens", "8")
DEADLINE = 120.0
NAMES = [name for name in Endpoints.__struct_fields__ if name != "bind_host"]
GOOD = ['{"id": "a", "prompt_token_ids": [1, 2]}', '{"id": "b", "prompt_token_ids": [3]}']


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, short for its sockets; nothing may be left in its `t`, nor run on."""
    path = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
    (path / "t").mkdir()
    (path / "prompts.jsonl").write_text("\n".join(GOOD))
    monkeypatch.setenv("TMPDIR", str(path / "t"))
    monkeypatch.chdir(path)
    yield path
    left = list((path / "t").glob("seer-*"))  # libraries keep caches there
    assert left == [], [file.read_text() for folder in left for file in folder.glob("*.log")]
    assert living(path) == []
    shutil.rmtree(path)


def refused(
    *command: str,
    code: int = 2,
    environ: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
    prefix: tuple[str, ...] = (),
    seer: tuple[str, ...] = SEER,
) -> str:
    """Run a command that must fail; return the last line it wrote, the error."""
    done = subprocess.run(
        [*prefix, *seer, *command], capture_output=True, text=True, timeout=DEADLINE, check=False,
        env=os.environ | dict(environ or {}), preexec_fn=before,
    )  # fmt: skip
    print(done.stderr)  # for whoever asks why a run left something
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.lower().startswith("error: ") or "stopped" in last, done.stderr
    return last


def rollout(*options: str) -> tuple[str, ...]:
    return ("rollout", "prompts.jsonl", "--out", "out.jsonl", *QUICK, *options)


# --- model folders ---------------------------------------------------------------------------


def model(folder: Path, **files: bytes | None) -> None:
    """Write a folder `model`: sound, but for the files given; `None` leaves one out."""
    config = {"architectures": ["X"], "max_position_embeddings": 32, "vocab_size": 100}
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    sound: dict[str, bytes | None] = {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": struct.pack("<Q", len(header)) + header + bytes(8),
    }
    (folder / "model").mkdir(exist_ok=True)
    for name, data in (sound | files).items():
        if data is not None:
            (folder / "model" / name).write_bytes(data)


SHARDS = json.dumps({"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}).encode()


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (None, "its config.json cannot be read (No such file or directory)"),
        ({"config.json": None}, "its config.json cannot be read (No such file or directory)"),
        ({"config.json": b"{"}, "its config.json is not valid JSON"),
        ({"config.json": b"[]"}, "its config.json is no model"),
        ({"model.safetensors": None}, "has no weights"),
        ({"model.safetensors": b""}, "holds a truncated or damaged model.safetensors"),
        ({"model.safetensors": b"version https://git-lfs.github.com"}, "truncated or damaged"),
        ({"model-2.safetensors": struct.pack("<Q", 2) + b"{}" + b"x"}, "damaged model-2.safetensors"),
        ({"model.safetensors.index.json": SHARDS}, "lacks model-2.safetensors"),
        ({"tokenizer.json": b"{"}, "tokenizer"),
    ],
)
def test_a_model_folder_that_cannot_be_used(folder: Path, files: dict | None, told: str) -> None:
    if files is not None:
        model(folder, **files)
    last = refused(*rollout("--model", "model"))
    assert "model" in last
    assert told in last
    assert not list(folder.glob("out.jsonl*"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_folder_that_may_not_be_read(folder: Path, name: str) -> None:
    model(folder)
    (folder / "model" / name).chmod(0)
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:  # who is root reads everything: give that up
        if shutil.which("setpriv") is None:
            pytest.skip("root, and no setpriv to become less")
        prefix = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
    last = refused(*rollout("--model", "model"), prefix=prefix)
    assert "--model = " in last
    assert "Permission denied" in last


# --- prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"id": "a", "prompt_token_ids": [1]}', "id = 'a': already used at prompts.jsonl:1"),
        (json.dumps({"id": "c", "prompt_token_ids": [1] * 40}), "prompt length = 40: with --max-tokens 8"),
    ],
)
def test_a_broken_third_line_is_named(folder: Path, line: str, told: str) -> None:
    model(folder)
    (folder / "prompts.jsonl").write_text("\n".join([*GOOD, line]))
    last = refused(*rollout(*REPLAY, "--model", "model"))
    assert last.startswith(f"error: prompts.jsonl:3: {told}")
    assert not list(folder.glob("out.jsonl*"))


# --- options and settings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("-n", "0"), "n = 0: must be in [1, 4096]"),
        (("-n", "5000"), "n = 5000: must be in [1, 4096]"),
        (("--temperature", "-1"), "sampling.temperature = -1.0: must be in [0.0, 100.0]"),
        (("--temperature", "nan"), "sampling.temperature = nan: must be in"),
        (("--max-tokens", "0"), "sampling.max_tokens = 0: must be in"),
        (("--max-tokens", "31"), "prompt length = 2: with --max-tokens 31 it exceeds the model's context of 32"),
        (("--seed", str(2**63)), "seed = 9223372036854775808: must be in [-9223372036854775808, 9223372036854775807]"),
        (("--set", "engine.kv_block=3"), "unknown key engine.kv_block; did you mean engine.kv_blocks?"),
        (("--set", "engine=3"), "--set engine=3: engine is a section"),
        (("--set", "engine.kv_blocks=many"), "engine.kv_blocks: Expected `int | null`"),
        (("--config", "bad.toml"), "bad.toml: unknown key engine.kv_block; did you mean engine.kv_blocks?"),
        (("--config", "none.toml"), "config file none.toml: No such file or directory; give a readable"),
        (("--connect", "nonsense"), "endpoint = 'nonsense': write tcp://host:port or ipc://path"),
        (("--connect", "tcp://127.0.0.1:99999"), "with a port below 65536"),
        (("--set", "endpoints.dgds=http://x"), "endpoints.dgds = 'http://x': write tcp://host:port"),
        (("--out", "none/out.jsonl"), "--out = 'none/out.jsonl': No such file or directory; give a file in"),
        (("--report", "/dev/full"), "--report = '/dev/full': give a file"),
    ],
)  # fmt: skip
def test_a_bad_option_is_named(folder: Path, options: tuple[str, ...], told: str) -> None:
    model(folder)
    (folder / "bad.toml").write_text("[engine]\nkv_block = 3\n")
    last = refused(*rollout(*REPLAY, "--model", "model", *options))
    assert told in last
    assert not list(folder.glob("out.jsonl*"))


@pytest.mark.parametrize(
    ("command", "name", "told"),
    [
        (
            rollout(*REPLAY), "SEER_ENGINE__KV_BLOCK",
            "unknown key engine.kv_block; did you mean engine.kv_blocks?",
        ),
        (("up",), "SEER_ENGIN__KV_BLOCKS", "unknown key engin; did you mean engine?"),
        (("dgds",), "SEER_ENGINE_KV_BLOCKS", "write two underscores after the section's name"),
    ],
)  # fmt: skip
def test_a_misspelt_environment_variable_is_named(
    folder: Path, command: tuple[str, ...], name: str, told: str
) -> None:
    last = refused(*command, environ={name: "3"})
    assert last == f"error: environment {name}: {told}"


# --- addresses ---------------------------------------------------------------------------------


def ipc(folder: Path, **others: str) -> list[str]:
    """Settings that put every endpoint into the folder, but for the others given."""
    at = {name: f"ipc://{folder}/{name}" for name in NAMES} | others
    return [part for name, endpoint in at.items() for part in ("--set", f"endpoints.{name}={endpoint}")]


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("buffer", name) for name in ("trainers", "engines", "events", "event_snapshots")),
        *(("context", name) for name in ("estimates", "estimate_snapshots")),
        *((command, "dgds") for command in ("dgds", "up")),
    ],
)
def test_a_port_in_use_is_named(folder: Path, taken: str, command: str, name: str) -> None:
    last = refused(command, *ipc(folder, **{name: taken}), "--set", "engine.backend=replay")
    assert f"cannot bind {taken}" in last
    assert "another process listens there; stop it or configure another port" in last
    if command == "up":
        assert last.startswith("error: dgds cannot start: ")


# --- memory and disks --------------------------------------------------------------------------


def test_an_engine_that_cannot_hold_one_sequence(folder: Path) -> None:
    last = refused(*rollout(*REPLAY, "--kv-blocks", "1"), code=1)
    assert "cannot start: engine.kv_blocks = 1 blocks of 32 cannot hold one sequence" in last
    assert not list(folder.glob("out.jsonl*"))


@pytest.mark.vllm
def test_an_engine_that_cannot_get_its_memory(folder: Path) -> None:
    shipped = Path(__file__).parents[2] / "examples/countdown/model"
    options = ("--model", str(shipped), "--instances", "1", "--kv-blocks", str(10**9))
    last = refused(*rollout(*options), code=1)
    assert "lower engine.kv_blocks (now 1000000000)" in last
    assert "there is not enough memory" in last
    assert not list(folder.glob("out.jsonl*"))


def files_up_to(size: int) -> Callable[[], None]:
    """Let a process write files of at most `size` bytes: to it, the disk is full."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_under_out(folder: Path) -> None:
    size = 6000  # room for what a local system writes to start
    (folder / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"id": str(i), "prompt_token_ids": [i]}) for i in range(40))
    )
    longer = rollout(*REPLAY, "--max-tokens", "100", "--set", "log.level=error")
    last = refused(*longer, before=files_up_to(size))
    assert last.startswith("error: --out = 'out.jsonl': out.jsonl.journal: File too large")
    assert "--resume" in last
    kept = folder / "out.jsonl.journal"
    assert [path.name for path in folder.glob("*out.jsonl*")] == [kept.name]

    resumed = subprocess.run(
        [*SEER, *longer, "--resume"], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    print(resumed.stderr)
    assert resumed.returncode == 0, resumed.stderr
    assert "of 40 prompts are done" in resumed.stderr
    assert len((folder / "out.jsonl").read_text().splitlines()) == 40
    assert not kept.exists()


@pytest.mark.parametrize(
    ("size", "told"), [(0, "--out = 'out.jsonl': cannot write"), (800, "TMPDIR: cannot write")]
)
def test_a_disk_without_room_to_begin(folder: Path, size: int, told: str) -> None:
    last = refused(*rollout(*REPLAY), before=files_up_to(size))
    assert told in last
    assert "File too large" in last
    assert not list(folder.glob("out.jsonl*"))


# --- other versions ----------------------------------------------------------------------------


@pytest.fixture
def system(folder: Path) -> Iterator[list[str]]:
    """A running system; yields its endpoints as settings. At its end it drains, without complaints."""
    settings = ipc(folder)
    options = ("--instances", "1", "--set", "engine.backend=replay", "--set", "log.format=json")
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen([*SEER, "up", *settings, *options], stdout=subprocess.DEVNULL, stderr=log)
    try:
        while "ready: trainers" not in (folder / "up.log").read_text():
            assert up.poll() is None
        yield settings
        up.terminate()
        assert up.wait(DEADLINE) == 0
        assert "Traceback" not in (folder / "up.log").read_text()
    finally:
        up.kill()
        up.wait()


def test_peers_of_another_version_are_refused_and_harm_nobody(folder: Path, system: list[str]) -> None:
    connect = ("--connect", f"ipc://{folder}/trainers")
    replay = ("--set", "engine.backend=replay")
    client = refused(*rollout(*connect), code=1, seer=ANOTHER_MAJOR)
    engine = refused("engine", *system, *replay, "--set", "engine.name=other", seer=ANOTHER_MAJOR)
    for last in (client, engine):
        assert "buffer speaks protocol" in last
        assert "run one version of seer-rollout everywhere" in last
    logged = [json.loads(line) for line in (folder / "up.log").read_text().splitlines() if line[:1] == "{"]
    told = [line["peer"].partition("/")[0] for line in logged if line["event"] == "peer refused"]
    assert told == ["trainer", "engine"]

    (folder / "prompts.jsonl").write_text(GOOD[0])  # its journal is shorter than the report
    short = rollout(*connect, "--max-tokens", "1", "--report", "report.json")
    last = refused(*short, before=files_up_to(900))
    assert last.startswith("error: --report = 'report.json': cannot be written: File too large")
    assert len((folder / "out.jsonl").read_text().splitlines()) == 1
    assert sorted(path.name for path in folder.glob("*.json*")) == ["out.jsonl", "prompts.jsonl"]
