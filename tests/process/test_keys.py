"""A whole system over TCP with keys: each process has its own, and who has none, or a wrong one, learns why."""

import asyncio
import contextlib
import os
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from seer.cli.keys import add, init, revoke
from seer.client import RolloutClient, SamplingParams
from seer.common.config import BufferConfig, Config, Endpoints, EngineConfig, SecurityConfig
from seer.common.errors import SeerError, Unauthorized
from seer.local.child import Child

PROMPTS = [[1, 2, 3, number] for number in range(8)]
SOCKETS = [name for name in Endpoints.__struct_fields__ if name != "bind_host"]


def ports(count):
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


class System:
    """Processes with keys of one folder."""

    def __init__(self, folder):
        self.folder, self.keys = folder, folder / "keys"
        init(self.keys)
        add(self.keys, ["engine:e0", "engine:e1", "trainer:run", "observer:top"], "")
        endpoints = dict(
            zip(SOCKETS, (f"tcp://127.0.0.1:{port}" for port in ports(len(SOCKETS))), strict=True)
        )
        engine = EngineConfig(
            backend="replay", kv_blocks=400, max_num_seqs=8, replay_mean_tokens=200, replay_step_seconds=0.005
        )
        self.config = Config(
            endpoints=Endpoints(**endpoints),
            engine=engine,
            buffer=BufferConfig(chunk_size=32, engine_silence_seconds=3.0),
        )
        self.children = {}

    def security(self, key, peers=False):
        return SecurityConfig(
            key=str(self.keys / f"{key}.key"),
            peers=str(self.keys / "public" / "peers") if peers else "",
            server=str(self.keys / "public" / "server.pub"),
        )

    async def start(self, service, name, key):
        config = replace(
            self.config,
            security=self.security(key, peers=True),
            engine=replace(self.config.engine, name=name, weights_endpoint="tcp://127.0.0.1:0"),
        )
        child = self.children[name] = await Child.spawn(service, name, config, {}, self.folder, logged=True)
        await child.ready(60)

    def client(self, key, endpoint=""):
        endpoint = endpoint or self.config.endpoints.trainers
        return RolloutClient(endpoint, security=self.security(key), connect_seconds=10)


@asynccontextmanager
async def running(folder):
    system = System(folder)
    try:
        for service in ("buffer", "context", "dgds"):
            await system.start(service, service, "server")
        for name in ("e0", "e1"):
            await system.start("engine", name, f"engine-{name}")
        yield system
    finally:
        for child in system.children.values():
            child.kill_group()
            await child.gone(10)


async def rolled(client, number, tokens):
    rollout = await client.submit(
        PROMPTS, n=4, sampling=SamplingParams(max_tokens=tokens), rollout_number=number
    )
    return await rollout.result()


async def test_every_process_has_a_key_and_does_what_it_is_for(tmp_path):
    async with running(tmp_path) as system, system.client("trainer-run") as client:
        assert client.name.startswith("run-")
        groups = await rolled(client, 0, 100)
        assert [len(group.responses) for group in groups] == [4] * len(PROMPTS)
        async with system.client("observer-top") as observer:
            assert {each.name for each in (await observer.status()).instances} == {"e0", "e1"}
            with pytest.raises(SeerError, match="may only read"):
                await rolled(observer, 1, 10)
        rolling = asyncio.create_task(rolled(client, 2, 400))
        await asyncio.sleep(0.5)
        revoke(system.keys, ["engine:e1"])
        assert len(await rolling) == len(PROMPTS)
        status = await client.status()
        assert [each.name for each in status.instances] == ["e0"]


async def test_the_command_line_takes_keys_from_the_environment(tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(f'{{"id": "{i}", "prompt_token_ids": [1, {i}]}}\n' for i in range(4)))
    async with running(tmp_path) as system:
        keys = system.security("trainer-run")
        seer = Path(sys.executable).with_name("seer")
        command = [seer, "rollout", prompts, "--out", out, "-n", "2", "--max-tokens", "20", "--connect"]
        environ = {"SEER_SECURITY__KEY": keys.key, "SEER_SECURITY__SERVER": keys.server}
        process = await asyncio.create_subprocess_exec(
            *command, system.config.endpoints.trainers, env=os.environ | environ,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, said
    assert len(out.read_text().splitlines()) == 4


async def test_who_is_not_in_the_list_learns_why(tmp_path):
    async with running(tmp_path) as system:
        async with system.client("engine-e0") as client:
            assert len((await client.status()).instances) == 2
            with pytest.raises(SeerError, match="may only read"):
                await client.update_weights(1, "somewhere")
        with pytest.raises(Unauthorized, match="keys are used at one end alone"):
            await RolloutClient(system.config.endpoints.trainers, connect_seconds=10).__aenter__()
        with pytest.raises(Exception, match="not for the name 'e7'"):
            await system.start("engine", "e7", "engine-e0")
        revoke(system.keys, ["trainer:run"])
        assert not (system.keys / "trainer-run.key").exists()
        async with system.client("operator-owner") as client:
            assert len(await rolled(client, 0, 20)) == len(PROMPTS)
