"""Draw docs/operations-top.svg and docs/operations-dashboard.svg, from a system that runs meanwhile.

Four replay engines, drafts off, run rollouts one after the other; one engine is killed amid them, and started
again. A real Prometheus (`requirements/prometheus.sh build/prometheus`) scrapes the exporter once a second.
The screen is that of `seer top` at the time of the kill; the panels are those of ops/dashboard.py, with what
Prometheus answers to their expressions. There is no Grafana here: matplotlib draws them. Prints JSON.

    python bench/services/operations_pictures.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl
import uvloop
from lib.hardware import machine
from lib.paths import ROOT
from msgspec.structs import replace
from observers import Exporter
from rich.console import Console
from thousand_engines import config_of

from seer.client import RolloutClient, SamplingParams
from seer.common.config import BufferConfig, Config
from seer.common.wire import Status
from seer.local.child import Child
from seer.observe.screen import Glance, screen, tokens_per_second

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "seer"  # the same picture has the same bytes
import matplotlib.pyplot as plt  # noqa: E402 - after the choice of a backend

ENGINES = 4
TITLES = (
    "Tokens/s", "Requests", "Expected time to the end", "Chunks: median and 90 %", "Engines",
    "KV blocks in use", "Last rollout", "Share of what is possible",
)  # fmt: skip


def table() -> ModuleType:
    """Return ops/dashboard.py."""
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "ops" / "dashboard.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018 - both of one kind
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start_prometheus(folder: Path, target: str, port: int) -> subprocess.Popen[bytes]:
    """Start Prometheus, and have it scrape the exporter."""
    found = shutil.which("prometheus") or str(ROOT / "build/prometheus/usr/bin/prometheus")
    jobs = [{"job_name": "seer", "static_configs": [{"targets": [target]}]}]
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "prometheus.yml").write_text(json.dumps({"global": every, "scrape_configs": jobs}))
    command = [found, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    return subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"])


def series(port: int, expression: str, since: float, until: float) -> list[dict[str, Any]]:
    """Return what Prometheus answers for a span of time."""
    query = {"query": expression, "start": f"{since}", "end": f"{until}", "step": "1"}
    url = f"http://127.0.0.1:{port}/api/v1/query_range?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return list(json.loads(answer.read())["data"]["result"])


def draw(path: Path, port: int, target: str, since: float, until: float) -> int:
    """Draw some of the panels; return how many series are in them."""
    dashboard = table()
    panels = {panel.title: panel for row in dashboard.ROWS for panel in row.panels}
    figure, axes = plt.subplots(
        len(TITLES) // 2, 2, figsize=(11, 2.4 * len(TITLES) / 2), layout="constrained"
    )
    drawn = 0
    for title, axis in zip(TITLES, axes.flat, strict=True):
        for line in panels[title].lines:
            expression = line.expr.replace("$job", "seer").replace("$instance", target)
            for each in series(port, expression.replace("$__rate_interval", "5s"), since, until):
                legend = line.legend
                for name, value in each["metric"].items():
                    legend = legend.replace(f"{{{{{name}}}}}", value)
                times = [float(at) - since for at, _ in each["values"]]
                axis.plot(times, [float(value) for _, value in each["values"]], label=legend, linewidth=1.2)
                drawn += 1
        unit = {"s": " (s)", "percentunit": " (share)"}.get(panels[title].unit, "")
        axis.set_title(f"{title}{unit}", fontsize=9, loc="left")
        axis.set_xlim(0, until - since)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="upper left", framealpha=0.6)
    figure.savefig(path, metadata={"Date": None})
    return drawn


class Looker:
    """Asks once a second, as `seer top` does."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self.seen: list[tuple[float, Status]] = []
        self.rates: list[float] = []

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.seen.append((time.monotonic(), await self._client.status()))
            self.rates.append(tokens_per_second(self.glance()))
            await asyncio.sleep(1.0)

    def glance(self) -> Glance:
        """Return what was seen last."""
        at, now = self.seen[-1]
        if len(self.seen) < 2:
            return Glance(now)
        before_at, before = self.seen[-2]
        return Glance(now, before, at - before_at, self.rates[-20:])


def draw_screen(path: Path, glance: Glance) -> None:
    """Draw `seer top`'s screen, of 90 x 18."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=90, file=nowhere, force_terminal=True)
        console.print(screen(glance, 90, 18), highlight=False)
        console.save_svg(str(path), title="seer top", unique_id="seer-top")


async def run(folder: Path, docs: Path) -> dict[str, Any]:
    """Run everything and draw."""
    config: Config = config_of(0.02, "")
    config = replace(config, buffer=BufferConfig(chunk_size=128, engine_silence_seconds=3.0))
    children: dict[str, Child] = {}

    async def start(service: str, name: str) -> None:
        engine = replace(
            config.engine,
            name=name,
            kv_blocks=600,
            max_num_seqs=12,
            replay=replace(config.engine.replay, mean_tokens=300, row_seconds=0.001),
        )
        named = replace(config, engine=engine)
        children[name] = await Child.spawn(service, name, named, {}, folder, logged=True)
        await children[name].ready(60)

    async with contextlib.AsyncExitStack() as stack:
        stack.callback(lambda: [each.kill_group() for each in children.values()])
        for name in ("buffer", "context", "dgds"):
            await start(name, name)
        for number in range(ENGINES):
            await start("engine", f"node{number}-0")
        exporter = Exporter(config.endpoints.trainers)
        stack.callback(exporter.process.kill)
        target = exporter.url.split("/")[2]
        port = int(target.split(":")[1]) + 1
        prometheus = start_prometheus(folder, target, port)
        stack.callback(prometheus.kill)
        client = await stack.enter_async_context(RolloutClient(config.endpoints.trainers))
        looker = Looker(client)
        looking = asyncio.create_task(looker.run())
        since = time.time()
        for step in range(3):
            prompts = [[1, 2, step, number] for number in range(16)]
            rollout = await client.submit(
                prompts,
                n=8,
                sampling=SamplingParams(max_tokens=1500),
                rollout_id=f"step-{step}",
                rollout_number=step,
            )
            result = asyncio.create_task(rollout.result())
            if step == 1:
                while rollout.progress is None or rollout.progress.finished < 0.6 * 128:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                children["node3-0"].kill_group()
                await asyncio.sleep(5.0)
                draw_screen(docs / "operations-top.svg", looker.glance())
                await start("engine", "node3-0")
            await result
        await asyncio.sleep(3.0)
        looking.cancel()
        drawn = await asyncio.to_thread(
            draw, docs / "operations-dashboard.svg", port, target, since, time.time()
        )
        return {"seconds": round(time.time() - since, 1), "series": drawn}


def main() -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder for the pictures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seer-bench-") as name:
        figures = uvloop.run(run(Path(name), options.out))
    print(json.dumps({"machine": machine("matplotlib", "rich", "prometheus_client"), **figures}, indent=1))


if __name__ == "__main__":
    main()
