"""A whole system over TCP with keys: each process has its own, and who has none, or a wrong one, learns why."""

import asyncio
import os
import sys
from pathlib import Path

import httpx
import pytest
from keyed_system import PROMPTS, ports, rolled, running
from msgspec.structs import replace

from seer.cli.keys import add, revoke
from seer.common.config import GatewayConfig, SharedConfig
from seer.common.errors import SeerError


async def test_every_process_has_a_key_and_does_what_it_is_for(tmp_path):
    async with running(tmp_path) as system, system.client("trainer-run") as client:
        assert client.name.startswith("run-")
        groups = await rolled(client, 0, 100)
        assert [len(group.responses) for group in groups] == [4] * len(PROMPTS)
        async with system.client("observer-top") as observer:
            assert {each.name for each in (await observer.status()).instances} == {"e0", "e1"}
            with pytest.raises(SeerError, match="may only read"):
                await rolled(observer, 1, 10)
        async with system.client("generator-agents") as generator:
            assert len(await rolled(generator, 3, 10)) == len(PROMPTS)
            with pytest.raises(SeerError, match="generator:agents, which has no right"):
                await generator.sleep()
        rolling = asyncio.create_task(rolled(client, 2, 400))
        await asyncio.sleep(0.5)
        revoke(system.keys, ["engine:e1"])
        assert len(await rolling) == len(PROMPTS)
        status = await client.status()
        assert [each.name for each in status.instances] == ["e0"]


async def test_requests_over_http_run_by_the_shares_of_their_keys_and_get_the_same_tokens(tmp_path):
    model = Path(__file__).parents[2] / "examples" / "countdown" / "model"
    async with running(tmp_path, log=str(tmp_path / "log")) as system, httpx.AsyncClient() as http:
        add(system.keys, ["gateway:http", "http:a", "http:b"], "")
        addresses = [f"127.0.0.1:{port}" for port in ports(2)]
        gateway = GatewayConfig(data=addresses[0], control=addresses[1])
        system.config = replace(system.config, gateway=gateway, shared=SharedConfig(model=str(model)))
        await system.start("gateway", "gateway", "gateway-http")
        async with asyncio.timeout(60):  # until it has heard from the buffer
            while (await http.get(f"http://{addresses[0]}/health")).status_code != 200:
                await asyncio.sleep(0.2)
        answers = []
        for name in ("a", "b"):
            secret = (system.keys / f"http-{name}.key").read_text().split()[1]
            answer = await http.post(
                f"http://{addresses[0]}/v1/completions", timeout=60.0,
                headers={"authorization": f"Bearer {secret}"},
                json={"model": "model", "prompt": [1, 2, 3], "seed": 7, "max_tokens": 20, "logprobs": 1},
            )  # fmt: skip
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"])
        assert answers[0] == answers[1]
        await asyncio.sleep(2.0)  # until the log is written
    lines = [line for file in (tmp_path / "log").rglob("*.jsonl") for line in file.read_text().splitlines()]
    submitted = [line for line in lines if "GroupsSubmitted" in line]
    assert len(submitted) == 2, [file.name for file in (tmp_path / "log").rglob("*")]
    assert ['"a"' in submitted[0], '"b"' in submitted[1]] == [True, True], submitted


SLEEPS = """
import asyncio, sys, time
from seer.client import RolloutClient

async def main():
    async with RolloutClient(sys.argv[1]) as client:
        await client.sleep()
        print("asleep", flush=True)
        time.sleep(600.0)

asyncio.run(main())
"""


async def test_a_trainer_that_is_blocked_has_engines_sleep_until_it_is_killed(tmp_path):
    async with (
        running(tmp_path, trainer_lease_seconds=10.0) as system,
        system.client("generator-agents") as other,
    ):
        keys = system.security("trainer-run")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SLEEPS, system.config.endpoints.trainers, stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"SEER_SECURITY__KEY": keys.key, "SEER_SECURITY__SERVER": keys.server},
        )  # fmt: skip
        try:
            assert await asyncio.wait_for(process.stdout.readline(), 60) == b"asleep\n"
            waits = asyncio.create_task(rolled(other, 0, 20))
            await asyncio.sleep(16.0)
            assert (await other.status()).asleep
        finally:
            process.kill()
            await process.wait()
        assert len(await asyncio.wait_for(waits, 60.0)) == len(PROMPTS)


async def test_the_command_line_takes_keys_from_the_environment_and_from_settings(tmp_path):
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
        keys = system.security("observer-top")
        asked = ["status", "--set", f"security.key={keys.key}", "--set", f"security.server={keys.server}"]
        process = await asyncio.create_subprocess_exec(
            seer, *asked, "--connect", system.config.endpoints.trainers, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, said
    assert len(out.read_text().splitlines()) == 4
