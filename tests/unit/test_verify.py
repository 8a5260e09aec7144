"""Comparison and verdicts on synthetic logits, and the command on the replay backend."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from verify_runs import prompts as prompts
from verify_runs import replayed

from seer.client.results import Group, Response
from seer.common.config import Config, EngineConfig, SharedConfig
from seer.common.errors import SeerError
from seer.common.types import SamplingParams
from seer.local.system import LaunchError
from seer.verify import run
from seer.verify.cell_run import CellRun, Job, Runner
from seer.verify.cells import CELLS, Cell
from seer.verify.compare import Mismatch, compare, logprob_tolerance
from seer.verify.numeric_or_bug import (
    Evidence,
    explaining_error,
    judge_token,
    logprob_deviation,
    measured_error,
)
from seer.verify.report import CellReport, Fault, Report
from seer.verify.run import most_random_position

PLAIN = SamplingParams()


def response(
    tokens: list[int], logprobs: list[float] | None = None, finish="length", reason="", index=0
) -> Response:
    values = [-1.0] * len(tokens) if logprobs is None else logprobs
    return Response(index, np.array(tokens, np.int32), np.array(values, np.float32), None, finish, reason)


def group(*responses: Response, prompt_id: str = "a", prompt_len: int = 3) -> Group:
    return Group(prompt_id, np.zeros(prompt_len, np.int32), {}, 0, "", responses, 1, 0, 0)


def differences(ours: Response, theirs: Response, temperature: float = 1.0, tolerance: float = 0.0):
    return compare([group(ours)], [group(theirs)], temperature, tolerance)


def evidence(logits, noise=None, spread=0.0, dtype="float32", sampling=PLAIN) -> Evidence:
    logits = np.array(logits, np.float32)
    scaled = logits.astype(np.float64) / (sampling.temperature or 1.0)
    noisy = scaled if noise is None else scaled + np.array(noise)
    other = logits.copy()
    other[0] += spread
    return Evidence(np.stack([logits, other]), scaled, noisy, dtype)


def token_mismatch(reference: int, found: int) -> Mismatch:
    return Mismatch(kind="token", prompt_id="a", index=0, position=0, reference=reference, found=found)


# --- comparison ------------------------------------------------------------------------------


def test_equal_runs_have_no_mismatch():
    found = differences(response([1, 2, 3]), response([1, 2, 3]))
    assert (found.responses, found.tokens, found.mismatches) == (1, 3, [])


def test_nothing_is_compared_after_a_divergence():
    ours, theirs = response([1, 2, 3, 4, 5], finish="stop"), response([1, 9, 8], [-1, -7, -7])
    found = differences(ours, theirs)
    (only,) = found.mismatches
    assert (only.kind, only.position, only.reference, only.found) == ("token", 1, 2, 9)
    assert (found.tokens, found.max_logprob_difference) == (2, 0.0)


def routed(tokens: list[int], change: Callable[[np.ndarray], object] = lambda routes: None) -> Response:
    """A response to a prompt of three tokens, in two layers of eight experts."""
    routes = np.random.default_rng(7).permuted(np.tile(np.arange(8), (len(tokens) + 2, 2, 1)), axis=2)[
        ..., :2
    ]
    change(routes)
    return replace(response(tokens), routed_experts=routes.astype(np.uint8))


def test_experts_are_compared_as_sets_as_far_as_the_tokens_agree():
    swapped = routed([*range(40)], lambda routes: routes.__setitem__(slice(None), routes[..., ::-1]))
    found = differences(routed([*range(40)]), swapped)
    assert (found.routes, found.other_routes, found.mismatches) == (42 * 2, 0, [])
    forked = routed([0, 1, 9, *range(3, 40)], lambda routes: routes.__setitem__(slice(5, None), 0))
    found = differences(routed([*range(40)]), forked)
    assert (found.routes, found.other_routes) == ((3 + 2) * 2, 0)
    assert differences(routed([1, 2]), response([1, 2])).routes == 0


def test_a_few_tokens_with_other_experts_are_rounding_and_a_shifted_layer_of_a_chunk_is_a_bug():
    few = routed([*range(40)], lambda routes: routes.__setitem__((slice(7, 10), 1), [8, 9]))
    found = differences(routed([*range(40)]), few)
    assert (found.other_routes, found.mismatches) == (3, [])

    def shift(routes: np.ndarray) -> None:
        routes[20:32, 1] = routes[19:31, 1].copy()

    found = differences(routed([*range(40)]), routed([*range(40)], shift))
    (only,) = found.mismatches
    assert (only.kind, only.verdict, only.reference) == ("routes", "bug", "experts of layer 1")
    assert 20 <= only.position <= 22


@pytest.mark.parametrize(
    "theirs",
    [
        response([1, 2], finish="stop", reason="7"),
        response([1, 2], finish="length", reason="8"),
        response([1, 2, 3]),
        response([1]),
    ],
)
def test_another_ending_after_the_same_tokens_is_a_bug(theirs: Response):
    (only,) = differences(response([1, 2]), theirs).mismatches
    assert (only.kind, only.verdict) == ("finish", "bug")


def test_logprobs_of_equal_tokens_must_agree_within_the_tolerance():
    ours, theirs = response([1, 2], [-1.0, -2.0]), response([1, 2], [-1.0, -2.25])
    assert differences(ours, theirs, tolerance=0.25).mismatches == []
    (only,) = differences(ours, theirs, tolerance=0.2).mismatches
    assert (only.kind, only.verdict, only.position) == ("logprob", "bug", 1)
    assert differences(ours, theirs, tolerance=0.2).max_logprob_difference == 0.25
    # At temperature 0.5 a logprob magnifies an error of the logits twofold.
    assert differences(ours, theirs, temperature=0.5, tolerance=0.13).mismatches == []


def test_a_logprob_that_is_no_number_is_a_bug():
    (only,) = differences(response([1], [math.nan]), response([1], [-1.0]), tolerance=9.0).mismatches
    assert only.kind == "logprob"


def test_a_missing_response_cannot_pass():
    with pytest.raises(ValueError, match="prompt a: 1 responses of 2"):
        compare([group(response([1]), response([2], index=1))], [group(response([1]))], 1.0, 0.0)


# --- verdicts --------------------------------------------------------------------------------


def test_a_gap_within_the_measured_error_is_numeric_a_wider_one_a_bug():
    close = evidence([5.0, 4.0, 0.0], noise=[0.0, 1.0 - 1e-4, 0.0], spread=6e-5)
    verdict = judge_token(token_mismatch(0, 1), close, PLAIN, 1e-3)
    assert (verdict.verdict, verdict.expected) == ("numeric", 0)
    assert verdict.gap == pytest.approx(1e-4, rel=1e-3)
    assert verdict.error == pytest.approx(1.2e-4, rel=1e-2)
    wide = evidence([5.0, 4.0, 0.0], noise=[0.0, 1.0 - 1e-2, 0.0], spread=6e-5)
    assert judge_token(token_mismatch(0, 1), wide, PLAIN, 1e-3).verdict == "bug"


def test_two_close_tokens_below_a_better_one_are_a_bug():
    third = evidence([5.0, 5.0, 9.0], spread=1e-3)
    verdict = judge_token(token_mismatch(0, 1), third, PLAIN, 1e-3)
    assert (verdict.verdict, verdict.expected, verdict.gap) == ("bug", 2, 4.0)


def test_three_tokens_within_the_error_excuse_any_two():
    close = evidence([5.0, 5.0, 5.0001], spread=1e-3)
    assert judge_token(token_mismatch(0, 1), close, PLAIN, 1e-3).verdict == "numeric"


def test_a_masked_token_is_never_excused():
    masked = evidence([5.0, -math.inf, 4.0], spread=1.0)
    verdict = judge_token(token_mismatch(0, 1), masked, PLAIN, 1e-3, deviation=100.0)
    assert (verdict.verdict, verdict.gap) == ("bug", math.inf)


def test_the_floor_is_the_dtypes_last_place():
    # bfloat16 has 8 bits: between 16 and 32 its numbers are 1/8 apart.
    coarse = evidence([20.0, 20.0], dtype="bfloat16")
    assert measured_error(coarse, [0, 1], PLAIN, 0.5, 0.0) == pytest.approx(0.25, 1e-3)
    assert measured_error(evidence([20.0, 20.0]), [0, 1], PLAIN, 1e-3, 0.0) < 1e-5


def test_temperature_magnifies_errors_of_logits():
    cold = SamplingParams(temperature=0.1)
    found = evidence([5.0, 5.0 - 1e-3], sampling=cold)
    assert explaining_error(found, [0, 1], cold) == pytest.approx(1e-3, rel=1e-2)


def test_logprobs_near_the_divergence_count():
    found = evidence([0.0, 0.0])
    half = math.log(0.5)
    ours, theirs = response([5, 0], [-1.0, half]), response([5, 1], [-1.5, half])
    assert logprob_deviation(ours, theirs, 1, found, 1.0) == pytest.approx(0.5)
    against_teacher = response([5, 1], [-1.0, half - 0.25])
    far = logprob_deviation(ours, against_teacher, 1, found, 1.0)
    assert far == pytest.approx(0.25)
    msgspec.json.encode(far)  # a report has it; numpy's floats cannot be encoded


@pytest.mark.parametrize(("spread", "deviation"), [(24.0, 0.0), (31.0, 0.0), (0.0, 24.0), (31.0, 31.0)])
def test_nothing_that_was_measured_excuses_more_than_twice_the_tolerance(spread, deviation):
    """A fault of engines and teacher alike moves logits by tens, and would excuse whatever it does."""
    found = evidence([5.0, 4.0, 0.0], noise=[0.0, 0.9, 0.0], spread=spread)
    assert measured_error(found, [0, 1], PLAIN, 1e-3, deviation) == 2e-3
    assert judge_token(token_mismatch(0, 1), found, PLAIN, 1e-3, deviation).verdict == "bug"
    near = evidence([5.0, 4.0, 0.0], noise=[0.0, 0.999, 0.0], spread=spread)
    assert judge_token(token_mismatch(0, 1), near, PLAIN, 1e-3, deviation).verdict == "numeric"


def test_a_token_at_the_edge_of_top_k_is_excused_by_the_edge_alone():
    sampling = SamplingParams(top_k=2)
    # Token 2 misses the cut by 1e-4, but has noise enough to win by far.
    edge = evidence([3.0, 2.0001, 2.0, 0.0], noise=[0.0, 0.0, 9.0, 9.0], sampling=sampling)
    assert explaining_error(edge, [0, 2], sampling) == pytest.approx(1e-4, rel=0.1)
    assert explaining_error(edge, [0, 3], sampling) > 1.9
    assert judge_token(token_mismatch(0, 2), edge, sampling, 1e-3).expected == 0


TRUNCATED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 4),
    top_p=st.sampled_from([0.3, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)


@given(TRUNCATED, st.floats(1e-3, 0.5), st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_a_flip_that_an_error_causes_is_explained_by_that_error(sampling, error, size, seed):
    """The checker's promise: arithmetic alone is never called a bug."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, random.choice([0.2, 3.0]), size)
    noise = random.gumbel(size=size) if sampling.temperature else np.zeros(size)
    drawn = draw(logits, noise, sampling)
    scaled = logits / (sampling.temperature or 1.0)
    found = Evidence(logits[None].astype(np.float32), scaled, scaled + noise, "float32")
    for _ in range(30):
        wrong = logits + random.uniform(-error, error, size) * random.integers(0, 2, size)
        other = draw(wrong, noise, sampling)
        if other != drawn:
            assert explaining_error(found, [drawn, other], sampling) <= 2 * error * 1.01


def draw(logits, noise, sampling: SamplingParams) -> int:
    """Truncate and draw as `torch_sampler` specifies, in float64."""
    x = logits / (sampling.temperature or 1.0)
    keep = x.max() + math.log(sampling.min_p) if sampling.min_p else -math.inf
    ranked = np.sort(x)[::-1]
    if sampling.top_k:
        keep = max(keep, ranked[min(sampling.top_k, len(x)) - 1])
    if sampling.top_p < 1:
        weights = np.where(ranked >= keep, np.exp(ranked - x.max()), 0.0)
        mass = np.cumsum(weights)
        keep = ranked[np.searchsorted(mass, sampling.top_p * mass[-1])]
    return int(np.where(x >= keep, x + noise, -math.inf).argmax())


@pytest.mark.parametrize(("versions", "tolerance"), [
    ({"dtype": "float32", "device": "cpu", "batch_invariant": "no"}, 1e-3),
    ({"dtype": "float32", "device": "cuda", "batch_invariant": "no"}, 0.05),
    ({"dtype": "float32", "device": "cuda", "batch_invariant": "yes"}, 1e-3),
    ({"dtype": "bfloat16", "device": "cuda", "batch_invariant": "no"}, 0.5),
    ({"engine": "replay"}, 0.0),
])  # fmt: skip
def test_logprobs_may_differ_by_what_the_device_s_arithmetic_explains(versions, tolerance):
    assert logprob_tolerance(versions) == tolerance


@given(st.integers(0, 2**32 - 1))
def test_an_unrelated_draw_is_not_explained(seed):
    random = np.random.default_rng(seed)
    logits, noise = random.normal(0, 3, 50), random.gumbel(size=(2, 50))
    drawn, other = draw(logits, noise[0], PLAIN), draw(logits, noise[1], PLAIN)
    assume(drawn != other)
    found = Evidence(logits[None].astype(np.float32), logits, logits + noise[0], "float32")
    verdict = judge_token(token_mismatch(drawn, other), found, PLAIN, 1e-3)
    assert verdict.verdict == "bug"
    assert verdict.expected == drawn


# --- report ----------------------------------------------------------------------------------


def report(
    *mismatches: Mismatch, tokens: int = 100, unmet=(), error="", fault=None, skipped=None, named=False
) -> Report:
    comparison = compare([group(response([1] * tokens))], [group(response([1] * tokens))], 1.0, 0.0)
    comparison.mismatches.extend(mismatches)
    counters = {"tokens": tokens, "chunks": 1, "migrations": 0, "preemptions": 0, "pool_tokens": 0}
    cell = CellReport(
        name="chunk-1", about="", counters=counters, unmet=list(unmet), error=error, comparison=comparison
    )
    return Report(
        versions={}, dtype="", seed=0, rollout_number=0, n=1, prompts=1, sampling=PLAIN, min_tokens=100,
        logprob_tolerance=0.0, skipped=skipped or {}, cells=[cell], fault=fault, named=named,
        reference=CellReport(name="one-go", about="", counters=counters),
    )  # fmt: skip


def numeric() -> Mismatch:
    return judge_token(token_mismatch(0, 1), evidence([5.0, 5.0]), PLAIN, 0.0)


def logprobs_off(expected: float | None) -> Mismatch:
    numbers = {"reference": -1.0, "found": -1.002, "expected": expected}
    return Mismatch(kind="logprob", prompt_id="a", index=0, position=0, **numbers)


def test_an_engine_of_the_reference_that_computed_wrongly_is_named():
    wrong = "in 2 of 3 that differ: the engine of one-go computed wrongly"
    whose = [logprobs_off(each) for each in (-1.002, -1.0019, -1.0, None)]
    (bugs, named) = report(*whose).failures()
    assert (bugs, wrong in named) == ("chunk-1 has 4 bugs, 0 unjudged", True)
    assert len(report(*whose[2:]).failures()) == 1


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (report(), ""),
        (report(numeric()), ""),
        (report(token_mismatch(0, 1)), "chunk-1 has 1 bugs"),
        (report(tokens=99), "only 99 tokens"),
        (report(unmet=["preemptions > 0 (was 0)"]), "no cell could be exercised"),
        (report(unmet=["preemptions > 0 (was 0)"], named=True), "did not exercise preemptions > 0"),
        (report(token_mismatch(0, 1), unmet=["preemptions > 0 (was 0)"]), "chunk-1 has 1 bugs"),
        (report(skipped={"pool-ssd": "what is under way fits"}), ""),
        (
            report(skipped={"pool-ssd": "what is under way fits"}, named=True),
            "pool-ssd what is under way fits",
        ),
        (report(error="engine lost"), "did not finish: engine lost"),
        (report(fault=Fault("chunk-1", 7)), "THE PLANTED FAULT WAS NOT FOUND"),
        (report(token_mismatch(0, 1), fault=Fault("chunk-1", 7)), "the planted fault was found"),
    ],
)
def test_what_keeps_a_report_from_passing(found: Report, says: str):
    failures = " ".join(found.failures())
    assert (says in failures) if says else not failures
    assert found.as_json()["passed"] is (not says)


@pytest.mark.parametrize(
    ("invariant", "ranks", "off", "says"),
    [
        ("yes", 1, "token", "chunk-1 has 1 numeric mismatches: batch-invariant kernels leave none"),
        ("yes", 1, "logprob", "chunk-1 has logprobs that differ by 1e-06: batch-invariant"),
        ("yes", 1, "", ""),
        ("yes", 2, "token", ""),  # ranks add in another order
        ("no", 1, "token", ""),
    ],
)
def test_arithmetic_is_no_excuse_for_kernels_that_are_batch_invariant(invariant, ranks, off, says):
    found = report(*([numeric()] if off == "token" else []))
    found.versions = {"batch_invariant": invariant}
    (cell,) = found.cells
    found.reference.counters = cell.counters | {"tensor_parallel": 1}
    cell.counters = cell.counters | {"tensor_parallel": ranks}
    if off == "logprob":
        cell.comparison = msgspec.structs.replace(cell.comparison, max_logprob_difference=1e-6)
    failures = " ".join(found.failures())
    assert (says in failures) if says else not failures


def test_the_json_is_strict_whatever_was_measured():
    masked = judge_token(token_mismatch(0, 1), evidence([5.0, -math.inf]), PLAIN, 1e-3)
    text = json.dumps(report(masked).as_json(), allow_nan=False)
    assert json.loads(text)["cells"][0]["comparison"]["mismatches"][0]["gap"] is None


def test_a_fault_is_planted_where_most_is_open():
    certain, open_at_2 = response([1, 2, 3], [0, 0, 0]), response([1, 2, 3], [-0.1, -0.1, -3])
    assert most_random_position([group(certain, open_at_2, prompt_len=4)]) == 6


# --- the run, with made-up cells ---------------------------------------------------------------


def run_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, perform: Callable[[str], CellRun]) -> Report:
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt_token_ids": [1, 2, 3]}')
    (tmp_path / "config.json").write_text("{}")

    async def run_cell(self, cell: Cell, *rest: object, **others: object) -> CellRun:
        return perform(cell.name)

    monkeypatch.setattr(Runner, "run", run_cell)
    job = Job(
        prompts=tmp_path / "prompts.jsonl", n=1, sampling=PLAIN, seed=0, matrix="chunk-1,preempt", min_tokens=1,
        config=Config(shared=SharedConfig(model=str(tmp_path)), engine=EngineConfig(backend="replay")),
    )  # fmt: skip
    return run.verify(job, lambda line: None)


def cell_run(cell: str) -> CellRun:
    counters = dict.fromkeys(("responses", "tokens", "migrations", "pool_tokens"), 1)
    counters |= {"chunks": 1 + (cell == "chunk-1"), "preemptions": int(cell == "preempt")}
    return CellRun(groups=[group(response([1, 2, 3]))], counters=counters, versions={}, seconds=1.0)


def test_a_cell_that_breaks_fails_alone(tmp_path, monkeypatch):
    def perform(cell: str) -> CellRun:
        if cell == "chunk-1":
            raise LaunchError("engine-0 was killed by SIGSEGV")
        return cell_run(cell)

    found = run_matrix(tmp_path, monkeypatch, perform)
    assert found.failures() == ["chunk-1 did not finish: engine-0 was killed by SIGSEGV"]
    assert found.tokens_compared == 3


def test_cells_with_every_sampling_parameter_are_compared_with_one_reference(tmp_path, monkeypatch):
    ran = []

    def perform(cell: str) -> CellRun:
        ran.append(cell)
        found = cell_run("chunk-1")
        stops = {"text_stops": 1, "id_stops": 1, "accepted_tokens": 1, "drafted_tokens": 2}
        return msgspec.structs.replace(found, counters=found.counters | stops)

    cells = [CELLS[name] for name in ("one-go", "sampling", "drafts-sampling")]
    monkeypatch.setattr(run, "choose", lambda *_: (cells, {}))
    monkeypatch.setattr(run, "tokenizer_of", lambda model: None)
    found = run_matrix(tmp_path, monkeypatch, perform)
    assert ran[-4:] == ["one-go", "one-go", "sampling", "drafts-sampling"]
    plain, drafted = found.cells
    assert plain.sampling == drafted.sampling
    assert plain.sampling not in (None, PLAIN)


def test_a_model_that_changes_between_cells_proves_nothing(tmp_path, monkeypatch):
    def perform(cell: str) -> CellRun:
        (tmp_path / "model.safetensors").write_text(cell)
        return cell_run(cell)

    with pytest.raises(SeerError, match="was changed while it was verified"):
        run_matrix(tmp_path, monkeypatch, perform)


# --- the command, on real sockets and the replay backend ---------------------------------------


def test_the_replay_engine_passes_its_whole_matrix(prompts: Path):
    result, found = replayed(prompts, "--max-tokens", 200, "--min-tokens", 1000)
    assert result.exit_code == 0, result.output
    assert "PASSED" in result.output
    assert found["passed"]
    assert found["tokens_compared"] >= 1000
    assert list(found["skipped"]) == [
        name
        for name, cell in CELLS.items()
        if name in ("tp-2", "dp-2", "synchronous") or cell.sampled or cell.pool or cell.drafts != "off"
    ]
    cells = {cell["name"]: cell for cell in found["cells"]}
    assert list(cells) == ["chunk-1", "chunk-16", "chunk-64", "two-instances", "migrate", "preempt"]
    assert cells["migrate"]["counters"]["migrations"] > 0
    assert cells["preempt"]["counters"]["preemptions"] > 0
    assert cells["chunk-1"]["counters"]["chunks"] == cells["chunk-1"]["comparison"]["tokens"]


def test_a_planted_fault_is_found(prompts: Path):
    result, found = replayed(
        prompts, "--max-tokens", 200, "--min-tokens", 10, "--plant-fault", "--matrix", "chunk-16,migrate"
    )
    assert result.exit_code == 1
    assert "the planted fault was found (in chunk-16" in result.output
    assert (found["cells"][0]["bug"] > 0, found["cells"][1]["bug"]) == (True, 0)


def test_a_cell_that_cannot_be_exercised_fails_only_if_it_was_named(prompts: Path):
    result, _ = replayed(prompts, "--max-tokens", 20, "--min-tokens", 10, "--matrix", "chunk-16,chunk-64")
    assert result.exit_code == 1
    assert "- chunk-64 no response is longer than 64 tokens" in result.output
    result, found = replayed(prompts, "--max-tokens", 2, "--min-tokens", 10)
    assert result.exit_code == 0, result.output
    assert "chunk-64: left out: no response is longer than 64 tokens" in result.output
    assert [cell["name"] for cell in found["cells"]] == ["chunk-1", "two-instances", "migrate", "preempt"]
    assert [cell["chunk_size"] for cell in found["cells"]] == [1, 1, 1, 0]


def test_responses_are_added_until_enough_is_compared_within_bounds(prompts: Path):
    result, found = replayed(prompts, "--max-tokens", 20, "--matrix", "chunk-1", "--min-tokens", 2000)
    assert result.exit_code == 0, result.output
    assert found["n"] > 4
    result, found = replayed(prompts, "--max-tokens", 1, "--matrix", "two-instances")
    assert (result.exit_code, found["cells"]) == (1, [])
    assert "two-instances no response is longer than one token" in result.output
    assert "at least 10000 are needed" in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--matrix", "nonsense"), "--matrix = 'nonsense'"),
        (("--matrix", "tp-2"), "replay backend has no tensor parallelism"),
        (("--matrix", "pool-warm"), "replay backend has no KV"),
        (("-n", 0), "n = 0"),
        (("--plant-fault", "--temperature", 0), "--temperature = 0"),
        (("--json", "/nowhere/report.json"), "--json"),
        (("--backend", "vllm"), "--model"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(prompts: Path, options: tuple, says: str):
    result, found = replayed(prompts, *options)
    assert result.exit_code == 2
    assert says in result.output
    assert not found
