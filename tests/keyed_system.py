"""A whole system over TCP, each process with a key of its own, and replay engines."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import urllib.error
import urllib.request
from contextlib import asynccontextmanager

from msgspec.structs import replace

from seer.cli.keys import add, init
from seer.client import RolloutClient, SamplingParams
from seer.common.config import BufferConfig, Config, Endpoints, EngineConfig, ReplayConfig, SecurityConfig
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
        add(self.keys, ["engine:e0", "engine:e1", "trainer:run", "observer:top", "generator:agents"], "")
        endpoints = dict(
            zip(SOCKETS, (f"tcp://127.0.0.1:{port}" for port in ports(len(SOCKETS))), strict=True)
        )
        engine = EngineConfig(
            backend="replay",
            kv_blocks=400,
            max_num_seqs=8,
            replay=ReplayConfig(mean_tokens=200, step_seconds=0.005),
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
async def running(folder, **buffer):
    """Yield a system; `buffer` are settings of its own."""
    system = System(folder)
    system.config = replace(system.config, buffer=replace(system.config.buffer, **buffer))
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


@asynccontextmanager
async def exporting(system, *options, key="observer-top"):
    """A `seer exporter` of the system; yields the address of its metrics."""
    security = system.security(key)
    environ = {"SEER_SECURITY__KEY": security.key, "SEER_SECURITY__SERVER": security.server}
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "seer.cli.main", "exporter", "--ready-fd", str(writing)]
    command += ["--connect", system.config.endpoints.trainers, "--listen", "127.0.0.1:0", *options]
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | environ, pass_fds=[writing], stderr=asyncio.subprocess.PIPE
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            line = await asyncio.wait_for(asyncio.to_thread(pipe.readline), 60)
        assert line, (await process.stderr.read()).decode()
        yield json.loads(line)["endpoints"]["metrics"]
        process.terminate()
        _, said = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0, said.decode()
        assert b"Traceback" not in said, said.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def scraped(url, **options):
    """The text at an address, with its status; `options` are headers."""

    def get():
        request = urllib.request.Request(url, headers=options)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(get)
