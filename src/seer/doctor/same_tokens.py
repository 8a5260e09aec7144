"""`seer verify` in small: chunks, drafts and moves, with and without batch-invariant kernels.

Invariant: a difference that no arithmetic explains fails; the rate of those that it does explain is a figure.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from seer.common.config import Config
from seer.common.errors import SeerError
from seer.common.types import SamplingParams
from seer.doctor.checked_config import given
from seer.doctor.report_lines import Report
from seer.local.hardware import plan_engines
from seer.local.pool_plan import import_problem
from seer.verify.cell_run import Job

if TYPE_CHECKING:
    from seer.verify.report import Report as Verified

PROMPTS, GROUP, TOKENS = 8, 4, 64
"""Prompts, responses to each, and tokens of each response."""

LEAST_TOKENS = 2_000
CELL_SECONDS = 200.0
_PROMPT = 12


def check(report: Report) -> None:
    """Run chunks, and drafts that move, with the configuration's kernels."""
    config = given(report)
    pooled = config.pool.kind != "none" and not import_problem()
    _verify(report, config, "chunk-16,drafts" if pooled else "chunk-16,drafts-random")


def other_kernels(report: Report) -> None:
    """Run chunks with the other choice of `engine.batch_invariant`: on GPUs."""
    config = given(report)
    if not plan_engines(config.engine, None)[0].environ:
        report.skip("no GPU: there are no batch-invariant kernels to compare with")
        return
    engine = replace(config.engine, batch_invariant=not config.engine.batch_invariant)
    _verify(report, replace(config, engine=engine), "chunk-16")


def _verify(report: Report, config: Config, matrix: str) -> None:
    from seer.verify.run import verify

    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("\n".join(json.dumps(each) for each in made_up_prompts(_vocabulary(config))))
        job = Job(
            prompts=prompts, n=GROUP, sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True), seed=0,
            config=config, matrix=matrix, min_tokens=LEAST_TOKENS,
            cell_seconds=CELL_SECONDS,
        )  # fmt: skip
        try:
            judge(report, verify(job, lambda line: print(line, flush=True)), config.engine.batch_invariant)
        except SeerError as error:
            report.expect(False, f"seer verify cannot run: {error}", f"run `seer verify --matrix {matrix}`")


def judge(report: Report, found: Verified, invariant: bool) -> None:
    """Judge what was verified, cell by cell."""
    for cell in found.cells:
        if cell.error or cell.comparison is None:
            report.expect(
                False, f"{cell.name} broke: {cell.error}", f"run `seer verify --matrix {cell.name}`"
            )
            continue
        if cell.unmet:
            report.note(f"{cell.name} did not do what it is there for: {'; '.join(cell.unmet)}")
        numeric = cell.count("numeric")
        bugs = len(cell.mismatches) - numeric  # also those that nobody judged, as there were too many
        report.expect(
            not bugs, f"the same tokens: {cell.about}",
            f"run `seer verify --matrix {cell.name}`, and report what it says",
            cell=cell.name, batch_invariant=int(invariant), tokens=cell.comparison.tokens, bugs=bugs,
            by_arithmetic=numeric,
            differences_per_million=round(cell.flips_per_million, 1), seconds=round(cell.seconds, 1),
        )  # fmt: skip
        if invariant:
            report.expect(
                not numeric, f"{cell.name}: no last bit differs", "report this: kernels are batch-invariant"
            )


def made_up_prompts(vocabulary: int) -> list[dict[str, object]]:
    """Return prompts of token ids, as lines for `seer verify`."""
    rows = [[(17 * row + 5 * i + 3) % vocabulary for i in range(_PROMPT)] for row in range(PROMPTS)]
    return [{"id": str(row), "prompt_token_ids": ids} for row, ids in enumerate(rows)]


def _vocabulary(config: Config) -> int:
    from seer.rollout.files import model_facts

    return model_facts(Path(config.shared.model)).vocab_size or 1_000
