"""Drafts of several kinds on one engine, in turns: tokens per second, acceptance, and that tokens are equal.

`off`, and ours from the tokens of a request (`own`) or of its group (`grouped`); with `--head` also a trained
head alone (`head`), and beside trees (`own+head`, `grouped+head`). Prints JSON. Responses of a group run one
after the other as there is room: with one running request, a group's later responses find all earlier ones.

    python bench/drafts/methods.py --model examples/countdown/model --prompts examples/countdown/prompts.jsonl
    python bench/drafts/methods.py ... --head examples/countdown/head --kinds off,grouped,head,grouped+head
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.hardware import machine
from msgspec import structs

if TYPE_CHECKING:
    from seer.services.engine.vllm.worker import SeerWorker

READY = "ready"
GROUP = 16
MAX_TOKENS = 512
RUNNING = {1: 1, 4: 2, 16: 3, 32: 6}
"""Requests that run at once, and how many groups of `GROUP` are measured with them."""

DRAFT = 8
KINDS = ("off", "own", "grouped", "head", "own+head", "grouped+head")


class Engine:
    """One contestant: an engine that drafts in one way."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        from tokenizers import Tokenizer

        from seer.common.config import DraftsConfig, EngineConfig, SharedConfig
        from seer.services.engine.vllm.backend import VllmBackend

        config = EngineConfig(
            max_num_seqs=64, max_model_len=MAX_TOKENS + 128, kv_cache_gib=1.0, cpu_cores="0"
        )
        source, _, _ = kind.partition("+")
        drafts = DraftsConfig(source="own" if kind == "head" else source, max_draft=DRAFT)
        if "head" in kind:
            drafts = structs.replace(drafts, head=options.head)
        self._backend = VllmBackend(config, SharedConfig(model=options.model), None, drafts)
        self._backend.start()
        if kind == "head":  # no chunk has a tree
            self._backend._drafting.begin = lambda _: ""
        if options.always and kind != "off":
            self._backend._drafting.start_always()
        self._seconds = [0.0]
        if kind != "off":
            self._backend.core.rpc(watch, seconds=self._seconds)
        tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
        lines = [json.loads(line)["prompt"] for line in options.prompts.read_text().splitlines()]
        self._prompts = [tokenizer.encode(line).ids for line in lines]
        self._turn = 0

    def run(self, running: int, turn: int) -> dict[str, Any]:
        """Run the groups of one measurement; each turn has keys and groups of its own."""
        from seer.common.types import SamplingParams
        from seer.services.engine.backend import Chunk

        backend, sampling = self._backend, SamplingParams(max_tokens=MAX_TOKENS)
        waiting = []
        for number in range(RUNNING[running]):
            tokens = self._prompts[(turn * RUNNING[running] + number) % len(self._prompts)]
            waiting += [
                Chunk(
                    request_id=f"{turn}.{running}.{number}#{index}", group_id=f"{turn}.{running}.{number}",
                    index=index, attempt=0, key=(turn * 64 + number) * 64 + index, prompt_len=len(tokens),
                    max_new_tokens=MAX_TOKENS, sampling=sampling, tokens=tokens,
                ) for index in range(GROUP)
            ]  # fmt: skip
        waiting.reverse()
        outputs: dict[str, list[int]] = {}
        verified = drafted = 0
        begun, before = time.perf_counter(), self._seconds[0]
        while waiting or backend.has_work():
            while waiting and len(backend._runs) < running:
                backend.add(waiting.pop())
            for generated in backend.step().generated:
                outputs.setdefault(generated.request_id, []).extend(generated.token_ids)
                verified += 1
            drafted += sum(len(run.request.spec_token_ids) for run in backend._runs.values())
        seconds = time.perf_counter() - begun
        tokens = sum(map(len, outputs.values()))
        return {
            "tokens_per_s": tokens / seconds,
            "tokens_per_verification": tokens / verified,
            "drafted": drafted,
            "accepted": tokens - verified,
            "draft_share": (self._seconds[0] - before) / seconds,
            "digest": zlib.crc32(json.dumps(sorted(outputs.items())).encode()),
        }


def watch(worker: SeerWorker, seconds: list[float]) -> None:
    """Add the time of every drafting of this worker to `seconds`."""
    drafter = worker.model_runner.speculator
    propose = drafter.propose

    @functools.wraps(propose)
    def timed(*args: object, **kwargs: object) -> object:
        begun = time.perf_counter()
        try:
            return propose(*args, **kwargs)
        finally:
            seconds[0] += time.perf_counter() - begun

    drafter.propose = timed


def serve(options: argparse.Namespace) -> None:
    """Run as a contestant: answer each `running turn` on stdin with a result."""
    engine = Engine(options.serve, options)
    engine.run(16, 1000)
    print(READY, flush=True)
    for line in sys.stdin:
        running, turn = map(int, line.split())
        print(json.dumps(engine.run(running, turn)), flush=True)


class Contestant:
    """A running contestant."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--serve", kind, "--model", options.model]
        command += ["--prompts", str(options.prompts), "--head", options.head]
        command += ["--always"] if options.always else []
        self._process = subprocess.Popen(
            ["taskset", "-c", "0", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        )  # fmt: skip
        while (line := self._line()) != READY:
            print(f"{kind}: {line}", file=sys.stderr)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a contestant ended with {self._process.wait()}; its stderr is above")
        return line.strip()

    def run(self, running: int, turn: int) -> dict[str, Any]:
        """See `Engine.run`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{running} {turn}\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        return found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def compare(contestants: dict[str, Contestant], running: int, turns: int) -> dict[str, Any]:
    """Let all take turns; relate each to `off` of the same turn. Exits when any token differs."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in contestants}
    for turn in range(turns):
        kinds = list(contestants)
        for kind in kinds if turn % 2 == 0 else kinds[::-1]:
            runs[kind].append(contestants[kind].run(running, turn))
        if len({results[turn]["digest"] for results in runs.values()}) != 1:
            raise SystemExit(f"with {running} running requests, turn {turn}: tokens differ")
    report: dict[str, Any] = {}
    for kind, results in runs.items():
        entry = {
            name: statistics.median(result[name] for result in results)
            for name in ("tokens_per_s", "tokens_per_verification", "drafted", "accepted", "draft_share")
        }
        ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(results, runs["off"], strict=True)]
        report[kind] = {name: round(value, 4) for name, value in entry.items()}
        report[kind]["over_off"] = {
            "median": round(statistics.median(ratios), 3), "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        }  # fmt: skip
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--head", default="", help="folder of a draft head")
    parser.add_argument("--always", action="store_true", help="draft in every step, whether it pays or not")
    parser.add_argument("--kinds", default=",".join(KINDS[:3]))
    parser.add_argument("--running", default=",".join(map(str, RUNNING)))
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    kinds = options.kinds.split(",")
    report: dict[str, Any] = {"machine": machine("torch", "vllm"), "group": GROUP, "max_tokens": MAX_TOKENS}
    report["turns"] = options.turns
    with contextlib.ExitStack() as stack:
        contestants = {}
        for kind in kinds:
            contestants[kind] = Contestant(kind, options)
            stack.callback(contestants[kind].close)
        for running in map(int, options.running.split(",")):
            report[f"running_{running}"] = compare(contestants, running, options.turns)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
