"""The vLLM backend: what it samples never depends on how the work was cut, batched or interrupted."""

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from engine_cases import (
    BASE,
    CASES,
    EOS,
    KEY,
    LENGTH,
    PROMPT,
    check_every_cut,
    check_only_the_spoilt_fail,
    chunk,
    clear,
    engine_of,
    one_go,
    piece_texts,
    run,
    sampling_of,
    spoil,
    with_min_tokens,
    with_stop_id,
    with_stop_string,
)
from planted import faults

from seer.client.results import Response
from seer.common.errors import EngineError, InvalidField, Unsampleable
from seer.common.types import SamplingParams
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.sampling import slot_rows
from seer.verify import teacher
from seer.verify.compare import Mismatch


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[VllmBackend]:
    with engine_of(tiny_model, kv_blocks=36) as engine:
        yield engine
        engine.close()  # and once more at the end


@pytest.fixture
def backend(engine: VllmBackend) -> Iterator[VllmBackend]:
    yield engine
    engine.fault_position = None
    clear(engine)


def test_a_fault_of_positions_is_planted_where_an_engine_reads_them(backend, monkeypatch):
    """Else `seer verify` would be shown to find faults that were none: planted where nothing looks."""
    chunks = [chunk("here", BASE), chunk("elsewhere", BASE, key=KEY + 1)]
    sound = run(backend, chunks)
    begun, fault = {KEY: len(PROMPT)}, faults.FAULTS["position-one-more"]
    monkeypatch.setattr(faults, "_begun", begun)
    monkeypatch.setattr(slot_rows.SlotRows, "rows", slot_rows.SlotRows.rows)  # to have it back at the end
    faults._plant_in_rows(slot_rows, lambda: fault, cls="SlotRows", name="rows")
    found = run(backend, chunks)
    assert found["here"].tokens != sound["here"].tokens
    assert found["elsewhere"].tokens == sound["elsewhere"].tokens


@pytest.mark.parametrize("case", CASES)
def test_a_chunk_boundary_anywhere_changes_nothing(backend, case):
    sampling = sampling_of(backend, case)
    check_every_cut(backend, sampling, one_go(backend, sampling))


def test_cases_exercise_what_they_name(backend):
    free = one_go(backend, BASE)
    assert one_go(backend, CASES["temperature"]).tokens != one_go(backend, CASES["greedy"]).tokens
    by_id = one_go(backend, with_stop_id(backend))
    assert by_id.finish == ("stop", str(by_id.tokens[-1]))
    assert by_id.tokens == free.tokens[: free.tokens.index(free.tokens[12]) + 1]
    stops = with_stop_string(backend)
    by_text = one_go(backend, stops)
    assert by_text.finish == ("stop", stops.stop[1])
    assert stops.stop[1] in "".join(piece_texts(by_text.tokens))
    assert stops.stop[1] not in "".join(piece_texts(by_text.tokens[:-1]))
    late = one_go(backend, with_min_tokens(backend))
    assert len(late.tokens) > 11
    assert not set(late.tokens[:11]) & {*with_min_tokens(backend).stop_token_ids, EOS}
    assert 9 not in one_go(backend, CASES["logit_bias"]).tokens


def test_eos_of_the_model_folder_stops_unless_ignored(backend):
    likely = {EOS: 100.0}
    stopped = one_go(backend, SamplingParams(max_tokens=4, logit_bias=likely))
    assert (stopped.tokens, stopped.finish) == ([EOS], ("stop", str(EOS)))
    ignored = one_go(backend, SamplingParams(max_tokens=4, logit_bias=likely, ignore_eos=True))
    assert (ignored.tokens, ignored.finish) == ([EOS] * 4, ("length", ""))


def test_a_stop_at_the_last_token_of_a_chunk_is_a_stop(backend):
    sampling = with_stop_id(backend)
    whole = one_go(backend, sampling)
    exact = one_go(backend, sampling, max_new_tokens=len(whole.tokens))
    assert exact.finish == whole.finish
    boundary = one_go(backend, sampling, max_new_tokens=len(whole.tokens) - 1)
    assert boundary.finish == ("", "")
    limit = msgspec.structs.replace(sampling, max_tokens=len(whole.tokens) - 1)
    assert one_go(backend, limit).finish == ("length", "")


def test_batches_and_preemptions_change_nothing(backend):
    sampling = SamplingParams(max_tokens=30, temperature=1.1, presence_penalty=0.5, ignore_eos=True)
    chunks = [chunk(str(i), sampling, key=KEY + i, prompt=[1 + i, *range(3, 50 + i)]) for i in range(16)]
    before = backend.stats().preemptions
    alone = {one.request_id: run(backend, [one])[one.request_id] for one in chunks}
    assert backend.stats().preemptions == before
    together = run(backend, chunks)
    preempted = sum(response.ends[0].preemptions for response in together.values())
    assert preempted == backend.stats().preemptions - before > 0
    for name, response in alone.items():
        assert together[name].tokens == response.tokens
        assert together[name].logprobs == pytest.approx(response.logprobs, abs=1e-4)


def test_chunks_that_wait_for_room_are_never_preempted(backend):
    sampling = SamplingParams(max_tokens=150, ignore_eos=True)
    names = [f"r{i}" for i in range(12)]
    at_once = run(backend, [chunk(name, sampling, key=i) for i, name in enumerate(names)])
    before = backend.stats()
    assert before.preemptions > 0
    waiting = [chunk(name, sampling, key=i, wait_for_room=True) for i, name in enumerate(names)]
    in_turn = run(backend, waiting)
    assert backend.stats().preemptions == before.preemptions
    assert all(in_turn[name].tokens == at_once[name].tokens for name in names)
    assert backend.stats().free_blocks == backend.capacity.kv_blocks


def test_a_chunk_that_would_wait_for_room_for_ever_is_refused(backend, monkeypatch):
    monkeypatch.setattr(backend.core, "capacity", msgspec.structs.replace(backend.capacity, kv_blocks=2))
    with pytest.raises(InvalidField, match="KV blocks"):
        backend.add(chunk("r", SamplingParams(max_tokens=150), wait_for_room=True))
    assert not backend.has_work()


def test_a_chunk_that_waits_for_room_can_be_dropped(backend):
    sampling = SamplingParams(max_tokens=150, ignore_eos=True)
    for i in range(12):
        backend.add(chunk(f"r{i}", sampling, key=i, wait_for_room=True))
    backend.step()
    assert backend.stats().waiting > 0
    for i in range(1, 12):
        backend.drop(f"r{i}", 0)
    assert backend.stats().waiting == 0
    while backend.has_work():
        backend.step()
    assert backend.stats().free_blocks == backend.capacity.kv_blocks


def test_a_response_is_a_function_of_its_key(backend):
    keys = [0, 1, 2**63, 2**64 - 1]
    responses = run(backend, [chunk(str(key), BASE, key=key) for key in keys])
    assert len({tuple(response.tokens) for response in responses.values()}) == len(keys)


def forward(folder: Path, tokens: list[int]) -> np.ndarray:
    """Return transformers' logits [len(tokens), vocab] of the same model."""
    import torch
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].numpy()


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("mode", ["scaled", "raw", "processed"])
def test_logprobs_are_those_of_a_plain_forward_pass(backend, tiny_model, mode):
    sampling = SamplingParams(max_tokens=LENGTH, temperature=0.7, top_k=9, logprobs=mode, ignore_eos=True)
    response = one_go(backend, sampling)
    logits = forward(tiny_model, PROMPT + response.tokens)[len(PROMPT) - 1 : -1]
    shown = logits if mode == "raw" else logits / 0.7
    if mode == "processed":
        shown = np.where(shown < np.sort(shown, -1)[:, -9:-8], -np.inf, shown)
    expected = log_softmax(shown)[np.arange(LENGTH), response.tokens]
    np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("sampling", "off", "blamed"),
    [
        (SamplingParams(max_tokens=LENGTH, temperature=0.7, top_k=9), "reference", True),
        (SamplingParams(max_tokens=LENGTH, temperature=0.7, logprobs="raw"), "found", False),
    ],
)
def test_the_teacher_of_verify_says_which_of_two_logprobs_is_off(backend, sampling, off, blamed):
    said = one_go(backend, sampling)
    ids, logprobs = np.array(said.tokens, np.int32), np.array(said.logprobs, np.float32)
    response = Response(0, ids, logprobs, None, "length", "")
    for at in (0, len(ids) // 2):
        values = dict.fromkeys(("reference", "found"), float(logprobs[at])) | {
            off: float(logprobs[at]) + 0.002
        }
        mismatch = Mismatch(kind="logprob", prompt_id="p", index=0, position=at, **values)
        case = teacher.Divergence(mismatch, response, response, PROMPT)
        found = teacher.with_logprob(case, sampling, backend)
        assert found.expected == pytest.approx(float(logprobs[at]), abs=1e-4)
        assert (found.verdict, found.blames_reference) == ("bug", blamed)


def test_greedy_is_the_argmax_of_a_plain_forward_pass(backend, tiny_model):
    response = one_go(backend, SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True))
    logits = forward(tiny_model, PROMPT + response.tokens)[len(PROMPT) - 1 : -1]
    assert response.tokens == logits.argmax(-1).tolist()


def test_logits_are_the_raw_ones(backend, tiny_model):
    for tokens in (PROMPT, PROMPT * 8):  # the second crosses many blocks
        row = backend.probe.logits(tokens)
        assert row.dtype == np.float32
        np.testing.assert_allclose(row, forward(tiny_model, tokens)[-1], atol=1e-4)
    backend.add(chunk("busy", BASE))
    with pytest.raises(EngineError, match="idle"):
        backend.probe.logits(PROMPT)
    backend.drop("busy", 0)


def test_a_planted_fault_changes_exactly_from_its_position(backend):
    clean = one_go(backend, CASES["temperature"])
    position = len(PROMPT) + 6
    backend.fault_position = position
    faulty = one_go(backend, CASES["temperature"])
    backend.fault_position = None
    assert faulty.tokens[:6] == clean.tokens[:6]
    assert faulty.tokens[6] != clean.tokens[6]
    assert one_go(backend, CASES["temperature"]).tokens == clean.tokens


def test_dropped_chunks_say_nothing_more_and_free_their_blocks(backend):
    alone = one_go(backend, BASE)
    for name in "abcd":
        backend.add(chunk(name, BASE))
    backend.drop("unknown", 0)
    backend.drop("a", 1)
    heard = defaultdict(list)
    ended = set()
    for step in itertools.count():
        if step == 3:
            backend.drop("b", 0)
            backend.drop("d", 0)
            backend.add(chunk("d", BASE, attempt=1))
            heard.clear()
        if not backend.has_work():
            break
        output = backend.step()
        for generated in output.generated:
            heard[generated.request_id, generated.attempt] += generated.token_ids
        ended |= {(end.request_id, end.attempt) for end in output.ended}
    assert ended == set(heard) == {("a", 0), ("c", 0), ("d", 1)}
    assert heard["d", 1] == alone.tokens
    assert heard["a", 0] == alone.tokens[3:]
    assert backend.stats().free_blocks == backend.capacity.kv_blocks == 36


def test_stats_count_what_happened(backend):
    before = backend.stats()
    prompt = [3 + (11 * i) % 190 for i in range(70)]
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    first = one_go(backend, sampling, prompt=prompt)
    again = one_go(backend, sampling, prompt=prompt)
    after = backend.stats()
    assert (first.ends[0].cached_tokens, again.ends[0].cached_tokens) == (0, 64)  # two full blocks
    assert after.cached_tokens - before.cached_tokens == 64
    assert after.prompt_tokens - before.prompt_tokens == 140
    assert after.generated_tokens - before.generated_tokens == 10
    assert after.steps > before.steps
    assert (after.running, after.waiting) == (0, 0)


ALL_IDS = tuple(range(200))
BAD = {
    "tokens": [
        {"tokens": [], "prompt_len": 1},
        {"tokens": [5, 200], "prompt_len": 1},
        {"tokens": [5, -1], "prompt_len": 1},
    ],
    "prompt_len": [{"prompt_len": 0}, {"prompt_len": len(PROMPT) + 1}],
    "turn_start": [{"turn_start": -1}, {"turn_start": len(PROMPT) - 1}, {"turn_start": len(PROMPT) + 1}],
    "max_new_tokens": [{"max_new_tokens": 0}, {"tokens": [5] * 250, "prompt_len": 250}],
    "key": [{"key": -1}, {"key": 2**64}],
    "sampling.max_tokens": [{"sampling": SamplingParams(max_tokens=1), "prompt_len": 1}],
    "sampling.stop_token_ids": [
        {"sampling": SamplingParams(stop_token_ids=(200,))},
        {"sampling": SamplingParams(stop_token_ids=ALL_IDS, min_tokens=1)},
    ],
    "sampling.logit_bias": [{"sampling": SamplingParams(logit_bias={200: 1.0})}],
    "sampling.top_p": [{"sampling": SamplingParams(top_p=0.0)}],
    "request_id": [{"request_id": "running"}],
}


@pytest.mark.parametrize(("field", "change"), [(field, change) for field in BAD for change in BAD[field]])
def test_bad_chunks_are_refused_by_name_and_hurt_nobody(backend, field, change):
    running = chunk("running", BASE)
    backend.add(running)
    backend.step()
    good = chunk("bad", BASE, max_new_tokens=10)
    with pytest.raises(InvalidField) as caught:
        backend.add(msgspec.structs.replace(good, **change))
    assert caught.value.field == field
    rest = []
    while backend.has_work():
        rest += [token for generated in backend.step().generated for token in generated.token_ids]
    assert rest == one_go(backend, BASE).tokens[1:]


def test_self_test_refuses_an_engine_that_samples_by_another_path(backend, monkeypatch):
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from seer.services.engine.vllm import self_test
    from seer.services.engine.vllm.slot_sampler import SlotSampler

    def greedy(_, logits, batch):
        best, one = logits.max(dim=-1, keepdim=True), batch.seq_lens.new_ones(batch.num_reqs)
        logprobs = LogprobsTensors(best.indices, best.values, best.indices[:, 0])
        return SamplerOutput(best.indices, logprobs, None, one, 0 * one)

    self_test.check(backend.probe)
    with monkeypatch.context() as patch:
        patch.setattr(SlotSampler, "__call__", greedy)
        with pytest.raises(EngineError, match="samples by another path"):
            self_test.check(backend.probe)
    self_test.check(backend.probe)


def test_self_test_refuses_one_wrong_token(backend):
    from seer.services.engine.vllm import self_test

    backend.fault_position = 8
    with pytest.raises(EngineError, match="reference sampler samples"):
        self_test.check(backend.probe)


def test_self_test_refuses_wrong_noise(backend, monkeypatch):
    from seer.services.engine.vllm import self_test, worker
    from seer.services.engine.vllm.sampling.sampler import sample_rows

    def off_by_one(logits, params):
        params.records["position"] += 1
        return sample_rows(logits, params)

    monkeypatch.setattr(worker, "sample_rows", off_by_one)
    with pytest.raises(EngineError, match="rank 0"):
        self_test.check(backend.probe)


def test_rows_that_cannot_be_sampled_fail_alone(backend, monkeypatch):
    everything = msgspec.structs.replace(CASES["everything"], stop=("ZZ",))
    kinds = [BASE, everything, CASES["repetition"], CASES["greedy"]]
    chunks = [chunk(f"r{i}", kinds[i % 4], key=KEY + i, prompt=PROMPT[: 4 + i]) for i in range(12)]
    at_prefill, later, last = KEY + 2, KEY + 5, KEY + 7
    spoilt = {at_prefill: 6, later: 12, last: 7 + 4 + LENGTH - 1}
    check_only_the_spoilt_fail(backend, monkeypatch, chunks, spoilt)


def test_an_engine_of_whose_model_no_logits_are_numbers_does_not_start(backend, monkeypatch):
    from seer.services.engine.vllm import self_test

    spoil(monkeypatch, {self_test._KEY: 0})
    with pytest.raises(Unsampleable, match=r"request self-test: .*\(NaN, or"):
        self_test.check(backend.probe)
    assert not backend.has_work()


def test_memory_that_holds_no_numbers_reaches_no_token(backend):
    """What a failed row leaves in blocks is others' memory next: attention must not look beyond its context."""
    chunks = [chunk(f"r{i}", BASE, key=KEY + i, prompt=PROMPT[: 3 + 2 * i]) for i in range(9)]
    before = run(backend, chunks)
    backend.core.reset_prefix_cache()
    runner = backend.core.engine_core.model_executor.driver_worker.worker.model_runner
    for tensor in runner.kv_caches:
        tensor.fill_(math.nan)
    after = run(backend, chunks)
    assert {name: each.tokens for name, each in after.items()} == {
        name: each.tokens for name, each in before.items()
    }


def test_memory_is_measured_with_our_sampler_before_kv_is_sized(backend):
    """On a GPU vLLM calls this in its profile, and again as it warms up."""
    runner = backend.core.engine_core.model_executor.driver_worker.worker.model_runner
    drawn = runner._dummy_sampler_run(runner.model.model.norm.weight[None])
    assert len(drawn) == runner.max_num_reqs
    assert (drawn >= 0).all()


def test_versions_name_what_generates(backend):
    assert backend.versions["engine"].startswith("vllm 0.32.")
    assert backend.versions["dtype"] == "float32"  # the checkpoint's own, although dtype is auto
    assert backend.core.vocab_size == 200


def python(code: str, *arguments: str, timeout: float = 560) -> list[str]:
    """Run code in an interpreter of its own (an engine reads its environment once); return its lines."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


REFUSALS = """
import json, sys
from pathlib import Path
from seer.common.config import EngineConfig, PoolConfig, SharedConfig
from seer.common.errors import EngineError
from seer.services.engine.vllm.backend import VllmBackend

model, scratch = sys.argv[1], Path(sys.argv[2])
(scratch / "empty").mkdir()
for name, text in {"broken": "{", "plain": "{}", "alien": '{"architectures": ["NoSuchModel"], "model_type": "x"}'}.items():
    (scratch / name).mkdir()
    (scratch / name / "config.json").write_text(text)
(scratch / "alien" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # well-formed, no tensors
small = dict(max_num_seqs=8, max_model_len=256, kv_blocks=40)
for folder, config in [
    (scratch / "missing", small), (scratch / "empty", small), (scratch / "broken", small),
    (scratch / "plain", small), (scratch / "alien", small), (model, small | {"cpu_cores": "0-x"}),
    (model, small | {"max_model_len": 100_000}), (model, small | {"kv_blocks": 3}), (model, small | {"kv_blocks": None, "kv_cache_gib": 1e6}), (model, small | {"name": "far"}), (model, small),
]:
    pool = PoolConfig(kind="mooncake", master="no-such-host.invalid:7108") if "name" in config else None
    backend = VllmBackend(EngineConfig(**config), SharedConfig(model=str(folder)), pool)
    try:
        backend.start()
        print("started")
    except EngineError as error:
        print(str(error).replace(chr(10), " "))
    backend.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_cannot_be_loaded_is_refused_with_the_field_and_the_fix(tiny_model, tmp_path):
    lines = python(REFUSALS, str(tiny_model), str(tmp_path))
    missing, empty, broken, plain, alien, cores, length, blocks, memory, far, good = lines
    assert "missing' is not a folder" in missing
    assert "no readable config.json" in empty
    assert "no readable config.json" in broken
    assert "names no architectures" in plain
    assert "alien' cannot be loaded" in alien
    assert all("give a Hugging Face model folder" in line for line in (missing, empty, broken, plain))
    assert cores.startswith("engine.cpu_cores = '0-x'")
    assert "engine.max_model_len (now 100000)" in length
    assert "or raise engine.kv_blocks (now 3)" in blocks
    assert "lower engine.kv_blocks (now None), engine.kv_cache_gib (now 1000000.0)" in memory
    assert "pool.master = 'no-such-host.invalid:7108'" in far or "Mooncake cannot be imported" in far
    assert good == "started"  # a failed start leaves nothing behind


TWO_RANKS = """
import sys
from engine_cases import engine_of
from shared_engines import MODEL

if __name__ == "__main__":
    with engine_of(MODEL, kv_blocks=40, tensor_parallel=2, cpu_cores=None):
        pass
"""


@pytest.mark.ranks
def test_ranks_end_with_an_engine_that_is_killed_while_they_load(tmp_path):
    file = tmp_path / "two_ranks.py"
    file.write_text(TWO_RANKS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, file], env=environment, start_new_session=True) as engine:
        ranks = []
        while len(ranks) < 2:
            time.sleep(0.1)
            assert engine.poll() is None
            found = psutil.Process(engine.pid).children()
            ranks = [each for each in found if "VLLM::Worker" in " ".join(each.cmdline())]
        engine.send_signal(signal.SIGSTOP)
        taken = []
        while (
            len(taken) < 2 or taken[-1] > taken[-2] + 0.5
        ):  # until they have loaded, and wait for the engine
            time.sleep(3)
            taken.append(sum(each.cpu_times().user for each in ranks))
        engine.kill()
    _, left = psutil.wait_procs(ranks, 60)
    for each in left:
        each.kill()
    assert not left
