"""A check beside a system with the same configuration: nothing of that system's is touched."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import fields, replace

from seer.client import RolloutClient, SamplingParams
from seer.common.config import Config, dump, load
from seer.local.beside import beside
from seer.local.system import LocalSystem

SEER = (sys.executable, "-m", "seer.cli.main")

READ = {
    "shared.model", "security.key", "security.peers", "security.server", "engine.weights_root",
    "engine.leave_notice", "engine.replay.trace", "drafts.head", "gateway.tls_certificate", "gateway.tls_key",
}  # fmt: skip
"""Files and folders that nobody writes to."""

NAMES = {
    "buffer.policy", "buffer.shares", "drafts.source", "engine.name", "engine.backend", "engine.dtype", "engine.cpu_cores",
    "engine.vllm.attention_backend", "engine.vllm.cudagraph_mode", "engine.vllm.kv_cache_dtype",
    "engine.vllm.quantization", "pool.kind", "pool.protocol", "pool.device", "pool.host", "gateway.model_name",
    "gateway.on_update", "gateway.logprobs", "gateway.tool_parser", "log.format", "log.level",
}  # fmt: skip
"""Texts that are neither folders nor addresses to listen at."""

PRIVATE = {
    "endpoints", "gateway.data", "gateway.control", "engine.leader", "pool.master", "pool.metrics", "pool.ports",
}  # fmt: skip
"""Addresses: a private system has others, and no gateway or further machine; a pool takes ports that are free."""


def texts(config: msgspec.Struct, prefix: str = "") -> dict[str, object]:
    """Return all settings that can be texts, by key."""
    found: dict[str, object] = {}
    for field in fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if isinstance(value, msgspec.Struct):
            found |= texts(value, f"{name}.")
        elif field.type is str or "str" in str(field.type) or "Literal" in str(field.type):
            found[name] = value
    return found


@pytest.fixture
def production(tmp_path: Path) -> Config:
    """Return a configuration in which every folder, file and port is set."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = [
        "engine.backend=replay", "engine.replay.step_seconds=0.0005",
        "engine.replay.mean_tokens=30", "dgds.remember_tokens=1000", "buffer.keep_chunks=true", "pool.ssd_gib=1",
        f"engine.weights_endpoint=tcp://127.0.0.1:{port}",
        *(f"buffer.{name}={tmp_path}/its/{name}" for name in ("log", "spool", "images")),
        f"dgds.remember_path={tmp_path}/its/remembered", f"drafts.cache={tmp_path}/its/cache",
        f"pool.ssd_path={tmp_path}/its/disk",
    ]  # fmt: skip
    (tmp_path / "its" / "cache").mkdir(parents=True)
    (tmp_path / "its" / "cache" / "steps-1.json").write_text("{}")
    return load(None, {}, settings)


def seen(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return what is in a folder, with times."""
    return {
        str(file): (file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else b"")
        for file in [folder, *folder.rglob("*")]
    }


async def test_verify_beside_a_running_system_changes_nothing_of_it(
    tmp_path: Path, production: Config
) -> None:
    file, prompts = tmp_path / "seer.toml", tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "p", "prompt_token_ids": [1, 2, 3]}))
    async with LocalSystem(production, 1) as system, RolloutClient(system.endpoint) as client:
        await (await client.submit([[1], [2]], n=2, sampling=SamplingParams(max_tokens=30))).result()
        await asyncio.sleep(1.0)  # the last tokens reach the dgds a little after the answer
        keys = replace(production.security, key=str(tmp_path / "no-key"))
        file.write_text(dump(replace(production, security=keys)))
        pids = list(system.pids.values())
        for pid in pids:  # so that whatever changes, the check did; sockets and locks stay theirs
            os.kill(pid, signal.SIGSTOP)
        try:
            before = seen(tmp_path / "its")
            command = f"verify {prompts} --config {file} -n 8 --max-tokens 60 --min-tokens 100 --matrix chunk-16,migrate"
            check = subprocess.run([*SEER, *command.split()], capture_output=True, text=True, timeout=300)
            assert seen(tmp_path / "its") == before
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    assert check.returncode == 0, check.stdout + check.stderr
    assert {"log", "spool", "images", "remembered", "cache"} <= {
        each.name for each in (tmp_path / "its").iterdir()
    }


def test_every_setting_that_is_a_path_or_an_address_is_another_one_in_a_check(production: Config) -> None:
    with beside(production) as own:
        ours, theirs = texts(own), texts(production)
        left = {
            name for name in theirs
            if name not in READ | NAMES and name not in PRIVATE and name.partition(".")[0] not in PRIVATE
        }  # fmt: skip
        assert {"buffer.log", "buffer.spool", "drafts.cache", "pool.ssd_path", "dgds.remember_path"} <= left
        assert not [name for name in left if not theirs[name]], "set it above, or say what kind of text it is"
        assert not [name for name in left if ours[name] == theirs[name]]
        assert not own.buffer.keep_chunks
        assert (Path(own.drafts.cache) / "steps-1.json").read_text() == "{}"
    assert not Path(own.drafts.cache).exists()
    assert (Path(production.drafts.cache) / "steps-1.json").exists()
