"""CPU seconds of an engine's process on one core, from its start to its end, by part; print JSON.

    python bench/engine/start.py --model examples/countdown/model [--turns 5] [--packages]

Of the process and its children, medians and ranges of the turns; `seconds` is its whole life by the clock,
which tells little beside other work. Contestants take turns, each in a process of its own: `seer` (an engine
without a buffer, whose process ends as that of `seer engine`), `sys.exit` (the same, ended by Python) and
`vllm` (bare vLLM with the same settings). `python` is the interpreter and our modules before an engine's,
`torch` and `vllm` are their imports, `load` is all else until the engine is ready, `close` what ends the
engine, `end` what ends the process. `--packages`: seconds by package, by the clock, of one more process
under `-X importtime`; each module without those that it imports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from lib.hardware import machine

MOST = 15
"""Packages that are listed."""

CHILD = """
import json, os, resource, sys
from seer.common.config import EngineConfig, SharedConfig
parts = {}
def part(name):
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    parts[name] = sum(each.ru_utime + each.ru_stime for each in usages)
how, model = sys.argv[1:]
settings = {"max_num_seqs": 8, "max_model_len": 512}
if how == "vllm":
    part("python")
    import torch
    part("torch")
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM
    import vllm.v1.engine.core_client
    part("vllm")
    llm = LLM(model, dtype="float32", enforce_eager=True, **settings)
    part("load")
    llm.llm_engine.engine_core.shutdown()
else:
    from seer.common.process.leave import leave
    from seer.services.engine.vllm import backend, env
    part("python")
    import torch
    part("torch")
    with env.without_collections():
        env.prepare(EngineConfig())
        import vllm.v1.engine.core_client
        part("vllm")
        engine = backend.VllmBackend(EngineConfig(kv_blocks=64, **settings), SharedConfig(model=model))
        engine.start()
    part("load")
    engine.close()
part("close")
print(json.dumps(parts), flush=True)
if how == "seer":
    leave(0)
"""


def started(how: str, model: str) -> dict[str, float]:
    """Run one process; return its CPU seconds by part, in all, and how long it lived."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, how, model],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{how}: exit status {status}")
    marks = json.loads(said.splitlines()[-1]) | {"end": usage.ru_utime + usage.ru_stime}
    parts = [after - before for before, after in itertools.pairwise((0.0, *marks.values()))]
    return dict(zip(marks, parts, strict=True)) | {"all": marks["end"], "seconds": time.monotonic() - began}


def summary(turns: list[dict[str, float]]) -> dict[str, str]:
    """Return the median and the range of each part."""
    found = {name: [turn[name] for turn in turns] for name in turns[0]}
    return {
        name: f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
        for name, each in found.items()
    }


def packages(model: str) -> list[dict[str, Any]]:
    """Return the seconds of all packages' modules, and of the slowest, without what each imports itself."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", CHILD, "seer", model],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds: Counter[str] = Counter()
    for line in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\w+)", done.stderr, re.MULTILINE):
        seconds[line[1]] += int(line[0])
    slowest = [("all", sum(seconds.values())), *seconds.most_common(MOST)]
    return [{"package": name, "seconds": microseconds / 1e6} for name, microseconds in slowest]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--packages", action="store_true")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    contestants = ["seer", "sys.exit", "vllm"]
    turns: dict[str, list[dict[str, float]]] = {how: [] for how in contestants}
    for turn in range(options.turns):
        for how in contestants[turn % 3 :] + contestants[: turn % 3]:
            turns[how].append(started(how, options.model))
    report: dict[str, Any] = {"machine": machine("vllm", "torch", "transformers")}
    report["CPU seconds"] = [{"process": how, **summary(each)} for how, each in turns.items()]
    if options.packages:
        report["imports"] = packages(options.model)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
