"""A real Prometheus, Debian's, scrapes a live system: rules and dashboard know what is there, and alerts fire."""

import asyncio
import json
import os
import re
import time
import urllib.parse
from contextlib import asynccontextmanager

import pytest
from keyed_system import exporting, ports, rolled, running, scraped
from ops_files import OPS, dashboard, promtool, tool

pytestmark = pytest.mark.skipif(
    not tool("prometheus"), reason="no Prometheus here: requirements/prometheus.sh build/prometheus"
)

MAY_BE_EMPTY = re.compile(r"weight_update|_pool_|prompt_tokens")
"""Nothing updates weights here, and replay engines have no pool."""


@asynccontextmanager
async def prometheus(folder, target):
    """Prometheus with the rules of ops/, but for their patience; yields its address."""
    rules = re.sub(r"for: \w+", "for: 2s", (OPS / "alerts.yml").read_text())
    (folder / "alerts.yml").write_text(rules)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [{"job_name": "seer", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    (port,) = ports(1)
    process = await asyncio.create_subprocess_exec(
        tool("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def asked(url, expression):
    """The samples of an expression."""
    query = urllib.parse.urlencode({"query": expression})
    status, text = await scraped(f"{url}/api/v1/query?{query}")
    assert status == 200, text
    return json.loads(text)["data"]["result"]


async def until(url, expression, seconds=40):
    """Wait until an expression has samples."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if found := await asked(url, expression):
                return found
        except OSError:  # it still starts
            pass
        await asyncio.sleep(0.2)
    raise AssertionError(f"no samples of {expression} in {seconds} s")


async def test_an_engine_is_killed_and_the_alert_fires(tmp_path):
    async with (
        running(tmp_path) as system,
        exporting(system) as metrics,
        system.client("trainer-run") as client,
    ):
        target = metrics.removeprefix("http://").removesuffix("/metrics")
        async with prometheus(tmp_path, target) as url:
            responses = [response for group in await rolled(client, 0, 100) for response in group.responses]
            await client.report_mismatch(responses, [response.logprobs for response in responses])
            rolling = asyncio.create_task(rolled(client, 1, 4000))
            await until(url, 'seer_engines{state="serving"} == 2 and on () seer_rollout_seconds > 0')
            await until(url, "rate(seer_tokens_total[10s]) > 0 and on () seer_eta_seconds")
            names = {line.split()[2] for line in (await scraped(metrics))[1].splitlines() if "# TYPE" in line}
            for expression, legend in dashboard().expressions(f'job="seer", instance="{target}"', "10s"):
                if not MAY_BE_EMPTY.search(expression):
                    assert await asked(url, expression), expression
                labels = re.findall(r"\{\{(\w+)\}\}", legend)
                for sample in await asked(url, expression):
                    assert set(labels) <= sample["metric"].keys(), expression
            used = dashboard().metrics() | set(re.findall(r"\bseer_\w+", (OPS / "alerts.yml").read_text()))
            assert used <= {name for each in names for name in (each, f"{each}_bucket")}
            assert not await asked(url, 'ALERTS{alertstate="firing"}')
            killed = time.monotonic()
            system.children["e1"].kill_group()
            await until(url, 'ALERTS{alertname="SeerEngineLost", alertstate="firing"}')
            print(f"from kill to firing: {time.monotonic() - killed:.1f} s, of which the rule waits for 2 s")
            assert len(await rolling) == 8
            system.children["buffer"].kill_group()
            await until(
                url, 'ALERTS{alertname="SeerBufferDown", alertstate="firing"} and on () up{job="seer"} == 1'
            )


@pytest.mark.parametrize("what", ["check", "test"])
def test_rules_do_what_they_say(what):
    promtool(what, "rules", {"check": "alerts.yml", "test": "alerts_test.yml"}[what])


def test_every_expression_of_the_dashboard_is_one(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, (expression, _) in enumerate(dashboard().expressions('job="seer"', "1m"))
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))
    rules[0]["expr"] += ")"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    with pytest.raises(AssertionError, match="unexpected right parenthesis"):
        promtool("check", "rules", str(file))
