"""`seer verify` on the real engine: clean cells agree, a planted fault is called a bug, rounding is not."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from shared_engines import EXAMPLE, ONE_CORE
from verify_runs import check_clean, check_faulty
from verify_runs import verify as verified

from seer.client import Prompt, RolloutClient, SamplingParams
from seer.common.config import load
from seer.local.pool_plan import import_problem
from seer.verify import cell_run
from seer.verify.cell_run import Job, Runner
from seer.verify.cells import CELLS

PLANTED = Path(__file__).parents[1] / "planted"


def verify(folder: Path, prompts: int, *options: object) -> tuple[int, dict, str]:
    path = folder / "prompts.jsonl"
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:prompts]
    path.write_text("\n".join(lines))
    return verified(folder, path, EXAMPLE / "model", *options)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("matrix", ["chunk-16", pytest.param("chunk-16,migrate", marks=pytest.mark.breadth)])
def test_a_planted_fault_is_called_a_bug_and_clean_cells_agree(tmp_path, matrix):
    size = ("-n", 2, "--max-tokens", 64, "--min-tokens", 300)
    code, report, text = verify(tmp_path, 6, *size, "--matrix", matrix, "--plant-fault", "--set", *ONE_CORE)
    assert code == 1
    assert "the planted fault was found (in chunk-16" in text
    faulty, *clean = report["cells"]
    check_faulty(faulty)
    for cell in clean:
        check_clean(cell, report)
    assert report["dtype"] == "float32"


@pytest.mark.timeout(900)
def test_a_fault_of_engines_and_teacher_alike_excuses_nothing(tmp_path, monkeypatch):
    """It moves the teacher's logits by tens: without a cap on what that excuses, all of this was numeric."""
    (tmp_path / "fault").write_text("context-last-token")
    monkeypatch.setenv("PYTHONPATH", str(PLANTED))
    monkeypatch.setenv("SEER_PLANTED", str(tmp_path / "fault"))
    monkeypatch.setenv("SEER_PLANTED_IN", "all")
    size = ("-n", 2, "--max-tokens", 64, "--min-tokens", 300)
    code, report, text = verify(tmp_path, 6, *size, "--matrix", "chunk-16", "--set", *ONE_CORE)
    (cell,) = report["cells"]
    assert (code, cell["numeric"], cell["bug"] > 3) == (1, 0, True), text


@pytest.mark.breadth
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_planted_fault_is_found_by_its_cell():
    script = Path(__file__).parents[2] / "bench" / "correctness" / "planted.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, found["missed"], found["clean_passes"]) == (0, [], True), done.stderr[-4000:]
    assert found["faults"] >= 30


@pytest.mark.breadth
@pytest.mark.timeout(900)
def test_a_fault_planted_in_turns_is_called_a_bug_and_a_clean_cell_agrees(tmp_path):
    size = ("-n", 4, "--max-tokens", 160, "--min-tokens", 1000)
    code, report, text = verify(
        tmp_path, 8, "--turns", *size, "--matrix", "turns-migrate,turns-recompute", "--plant-fault",
        "--set", *ONE_CORE,
    )  # fmt: skip
    assert code == 1
    assert "the planted fault was found (in turns-migrate" in text
    faulty, clean = report["cells"]
    check_faulty(faulty)
    assert not clean["unmet"]
    assert clean["bug"] == 0
    assert clean["counters"]["tokens"] == report["reference"]["counters"]["tokens"]


@pytest.mark.breadth
async def test_engines_that_go_on_to_the_next_cell_keep_no_kv(tiny_model, monkeypatch):
    settings = [
        f"shared.model={tiny_model}",
        "pool.kind=none",
        "engine.max_model_len=200",
        "engine.kv_blocks=60",
    ]
    job = Job(
        prompts=tiny_model, n=1, sampling=SamplingParams(max_tokens=40, ignore_eos=True), seed=0,
        config=load(None, {}, [*settings, *ONE_CORE]),
    )  # fmt: skip
    prompts = [Prompt(str(i), token_ids=[10 + i] * 70) for i in range(6)]  # none begins like another
    pids, cached, said = [], [0], []

    async def reused(name: str) -> int:
        """Run a cell; return how many tokens of prompts and of what chunks began with were not computed."""
        found = await runner.run(CELLS[name], CELLS[name].config(job.config), 1)
        said.append([group.responses[0].token_ids.tolist() for group in found.groups])
        assert runner._system is not None
        pids.append(runner._system.pids["engine-0"])
        async with RolloutClient(runner._system.endpoint) as client:
            cached.append(sum(each.stats.cached_tokens for each in (await client.status()).instances))
        return cached[-1] - cached[-2]

    async with Runner(job, prompts, lambda line: None) as runner:
        assert await reused("one-go") == 0
        of_its_own = await reused("chunk-16")
        assert await reused("one-go") == 0
        assert await reused("chunk-16") == of_its_own
        monkeypatch.setattr(cell_run, "_forget_kv", lambda *_: asyncio.sleep(0))
        assert await reused("one-go") == 6 * 64  # two whole blocks each
    assert len(set(pids)) == 1
    assert all(tokens == said[0] for tokens in said)


@pytest.mark.breadth
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_engine_and_a_disk_below_the_pool_change_no_token(tmp_path):
    if problem := import_problem():
        pytest.skip(f"Mooncake cannot be imported ({problem})")
    size = ("-n", 4, "--max-tokens", 192, "--min-tokens", 10_000)
    code, report, text = verify(tmp_path, 8, *size, "--matrix", "pool-warm,pool-ssd", "--set", *ONE_CORE)
    assert code == 0, text
    warm, disk = report["cells"]
    assert warm["counters"]["restarts"] > 0 < warm["counters"]["pool_tokens"]
    assert disk["counters"]["pool_ssd_reads"] > 0


@pytest.mark.breadth
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_matrix_passes(tmp_path):
    # A pool's smallest memory must be too small for what is under way.
    code, report, text = verify(tmp_path, 16, "-n", 8, "--max-tokens", 256)
    assert code == 0, text
    assert report["passed"]
    cannot = {"synchronous"}  # that is every cell's schedule on a CPU
    cannot |= {name for name in CELLS if name.endswith("dp-2")}  # this model is no mixture
    if import_problem():
        cannot |= {name for name, cell in CELLS.items() if cell.pool}
    assert set(report["skipped"]) == cannot
    assert [cell["name"] for cell in report["cells"]] == [
        name for name in list(CELLS)[1:] if name not in cannot
    ]
    assert report["tokens_compared"] > 50_000


@pytest.mark.breadth
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_single_short_response_is_made_to_preempt_and_is_compared(tmp_path):
    size = ("-n", 1, "--max-tokens", 128, "--min-tokens", 1)
    code, report, text = verify(tmp_path, 1, *size, "--matrix", "preempt", "--set", *ONE_CORE)
    assert code == 0, text
    (cell,) = report["cells"]
    assert cell["counters"]["preemptions"] > 0
    assert cell["comparison"]["responses"] == cell["n"] == report["n"] > 1


@pytest.mark.breadth
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_cells_with_turns_pass(tmp_path):
    code, report, text = verify(tmp_path, 8, "--turns", "-n", 4, "--max-tokens", 160)
    assert code == 0, text
    pool = [] if import_problem() else ["turns-pool"]
    assert [cell["name"] for cell in report["cells"]] == ["turns-migrate", *pool, "turns-recompute"]


@pytest.mark.breadth
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rounding_of_bfloat16_is_numeric_not_a_bug(tmp_path):
    """Two ranks sum in another order: hundreds of flips per million tokens, all within the error."""
    options = ("-n", 4, "--max-tokens", 400, "--matrix", "tp-2", "--set", "engine.dtype=bfloat16")
    code, report, text = verify(tmp_path, 24, *options)
    assert code == 0, text
    (cell,) = report["cells"]
    assert cell["numeric"] > 0
    assert all(m["gap"] <= m["error"] < 1.0 for m in cell["comparison"]["mismatches"])
