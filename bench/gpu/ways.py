"""Whether an engine's logits depend on the way to a context: batches, drafts, prefills, chunks, bit for bit.

    python bench/gpu/ways.py ways.json --model path/to/hf-model
    python bench/gpu/ways.py ways.json --set engine.dtype=bfloat16 --set engine.batch_invariant=true

An engine in this process generates responses alone, token by token, and then reaches the same contexts in
the ways that schedules have: beside other requests, while drafts are verified, by a prefill with nothing
cached and with full blocks cached, in chunks of 16. Writes, after each of them, by way how many rows were
compared, how many differ in a bit, and the largest difference.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from lib.hardware import machine
from lib.paths import EXAMPLE
from msgspec.structs import replace

from seer.common.config import load
from seer.common.types import SamplingParams
from seer.local.hardware import plan_engines
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.drafts.draft_script import DraftScript

PROMPT, TOKENS, CHUNK = 12, 300, 16
BESIDE = (0, 15, 100)
DRAFTS = ((2, 0), (8, 0), (8, 60))
"""Random drafts of each request, and the requests beside it."""

LENGTHS = (1, 5, 17, 20, 33, 50, 64, 77, 100, 129, 150, 200, 256, 280, 299)
"""Tokens of a response after which its context is prefilled."""

Rows = npt.NDArray[np.float32]


class Ways:
    """Generates one response in all ways."""

    def __init__(self, backend: VllmBackend, drafts: bool, most: int) -> None:
        """`most`: requests beside the response, at most."""
        self._backend, self._drafts, self._most = backend, drafts, most

    def all(self, response: int) -> Iterator[tuple[str, Rows, Rows]]:
        """Yield the name of a way, its rows, and those of the response generated alone."""
        chunk = self._chunk(str(response), response)
        tokens, alone = self._captured(chunk, 0, 0)
        for beside in (each for each in BESIDE if each <= self._most):
            yield f"beside {beside}", *self._common(*self._captured(chunk, beside, 0), tokens, alone)
        for count, beside in (each for each in DRAFTS if self._drafts and each[1] <= self._most):
            found = self._captured(chunk, beside, count)
            yield f"{count} drafts beside {beside}", *self._common(*found, tokens, alone)
        for length in LENGTHS:
            context = chunk.tokens + tokens[:length]
            self._backend.core.reset_prefix_cache()
            for way in ("a prefill", "a prefill behind cached blocks"):
                yield way, self._backend.probe.logits(context)[None], alone[length : length + 1]
        self._backend.core.reset_prefix_cache()
        yield f"chunks of {CHUNK}", *self._common(*self._chunked(chunk), tokens, alone)

    def _captured(self, chunk: Chunk, beside: int, drafts: int) -> tuple[list[int], Rows]:
        if self._drafts:
            kind = "random" if drafts else "none"
            script = DraftScript(kind=kind, vocab=self._backend.core.vocab_size, count=drafts)
            self._backend.probe.script_drafts(script)
        self._backend.core.reset_prefix_cache()
        company = [self._chunk(f"beside {row}", 50 + row) for row in range(beside)]
        tokens, ranks = self._backend.probe.capture(chunk, company)
        if self._drafts:
            none = DraftScript(kind="none", vocab=self._backend.core.vocab_size)
            self._backend.probe.script_drafts(none)
        return tokens, ranks[0]

    def _chunked(self, chunk: Chunk) -> tuple[list[int], Rows]:
        tokens: list[int] = []
        rows = []
        while len(tokens) < TOKENS:
            size = min(CHUNK, TOKENS - len(tokens))
            part = replace(chunk, tokens=chunk.tokens + tokens, max_new_tokens=size)
            found, ranks = self._backend.probe.capture(part)
            tokens += found
            rows.append(ranks[0])
        return tokens, np.concatenate(rows)

    def _common(self, found: list[int], rows: Rows, tokens: list[int], alone: Rows) -> tuple[Rows, Rows]:
        """Return the rows of equal contexts: to the first token that differs."""
        pairs = zip(found, tokens, strict=False)
        equal = next((place for place, (one, other) in enumerate(pairs) if one != other), len(tokens) - 1)
        return rows[: equal + 1], alone[: equal + 1]

    def _chunk(self, name: str, row: int) -> Chunk:
        vocab = self._backend.core.vocab_size
        return Chunk(
            request_id=name, group_id="", attempt=0, key=1000 + row, prompt_len=PROMPT, max_new_tokens=TOKENS,
            sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
            tokens=[(7 * row + 3 * place + 1) % vocab for place in range(PROMPT)],
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model")
    parser.add_argument("--responses", type=int, default=3)
    parser.add_argument("--beside", type=int, default=max(BESIDE), help="most requests beside a response")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    given = parser.parse_args()
    settings = [f"shared.model={given.model}", "engine.max_num_seqs=128", "engine.max_model_len=1024"]
    # One step at a time: scripts say what each step drafts.
    config = load(None, {}, [*settings, "engine.async_scheduling=false", *given.sets])
    plan = plan_engines(config.engine, 1)[0]
    backend = VllmBackend(plan.config, config.shared, None, config.drafts)
    backend.start()
    layout = backend.core.rpc("seer_kv_layout")[0][0]
    report = {"machine": machine("torch", "vllm"), "versions": backend.versions, "attention": layout}
    ways: dict[str, dict[str, float]] = {}
    for response in range(given.responses):
        ways_of = Ways(backend, config.drafts.source != "off", given.beside)
        for way, rows, alone in ways_of.all(response):
            apart = np.abs(rows - alone).max(axis=1)
            sums = ways.setdefault(way, {"rows": 0, "differ": 0, "largest": 0.0})
            sums["rows"] += len(apart)
            sums["differ"] += int((apart > 0).sum())
            sums["largest"] = max(sums["largest"], float(apart.max()))
            given.out.write_text(
                json.dumps(report | {"responses": response + 1, "ways": ways}, indent=1) + "\n"
            )
    backend.close()


if __name__ == "__main__":
    main()
