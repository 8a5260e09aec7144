"""The replay engine: what it generates, how it batches and preempts, what it refuses."""

import json
import statistics

import pytest
from msgspec import structs

from seer.common.config import EngineConfig, ReplayConfig, SharedConfig
from seer.common.errors import ConfigError, EngineError, InvalidField
from seer.common.types import Capacity, SamplingParams
from seer.services.engine.backend import Chunk
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.replay.kv_model import KvModel, Sequence
from seer.services.engine.replay.responses import SyntheticResponses

BLOCK = 4


def backend(**settings):
    own = {name: settings.pop(name) for name in ("trace", "step_seconds", "row_seconds") if name in settings}
    replay = ReplayConfig(vocab_size=1000, **own)
    made = ReplayBackend(
        EngineConfig(backend="replay", replay=replay, **settings), SharedConfig(block_size=BLOCK)
    )
    made.start()
    return made


def chunk(index=0, prompt=(1, 2, 3), output=(), new=8, attempt=1, prompt_id="p", turn_start=0, **sampling):
    return Chunk(
        request_id=f"r/{prompt_id}#{index}",
        group_id=f"r/{prompt_id}",
        attempt=attempt,
        key=2**63 + index,
        prompt_len=len(prompt),
        max_new_tokens=new,
        sampling=SamplingParams(**{"max_tokens": 4096, **sampling}),
        tokens=[*prompt, *output],
        turn_start=turn_start,
    )


def run(engine):
    """Step until idle; return request id -> (tokens, logprobs), and the ends by request id."""
    outputs, ends = {}, {}
    while engine.has_work():
        out = engine.step()
        for news in out.generated:
            tokens, logprobs = outputs.setdefault(news.request_id, ([], []))
            tokens += news.token_ids
            logprobs += news.logprobs
        ends |= {end.request_id: end for end in out.ended}
    return outputs, ends


def alone(item, **settings):
    engine = backend(**settings)
    engine.add(item)
    ((tokens, logprobs),), (end,) = (tuple(part.values()) for part in run(engine))
    return tokens, logprobs, end


# --- what it generates -----------------------------------------------------------------------


def test_a_response_ends_at_its_natural_length_with_a_stop_token():
    tokens, logprobs, end = alone(chunk(new=4096))
    assert 1 <= len(tokens) < 4096
    assert (end.finish, end.stop_reason) == ("stop", str(tokens[-1]))
    assert all(0 <= token < 1000 for token in tokens)
    assert all(-2 < value <= 0 for value in logprobs)


def test_lengths_are_heavy_tailed_with_the_configured_mean_and_shared_by_siblings():
    lengths = [
        [
            SyntheticResponses(1000, 256).length(chunk(index=100 * group + i, prompt=(group,)))
            for i in range(8)
        ]
        for group in range(1, 500)
    ]
    every = [length for group in lengths for length in group]
    assert 200 < statistics.mean(every) < 320
    assert max(every) > 5 * 256
    assert statistics.median(every) < 0.8 * statistics.mean(every)
    first, second = zip(*[group[:2] for group in lengths], strict=True)
    assert statistics.correlation(first, second) > 0.3


def test_a_response_from_elsewhere_past_its_end_is_refused():
    natural = len(alone(chunk(new=4096))[0])
    with pytest.raises(InvalidField, match=f"ends after {natural} output tokens"):
        backend().add(chunk(new=50, output=range(natural)))


def test_each_turn_has_a_length_of_its_own():
    first = alone(chunk(new=4096))[0]
    every = alone(chunk(new=4096, ignore_eos=True))
    lengths = {len(first)}
    for said in range(1, 6):
        start = 3 + len(first) + said
        turn = {"output": [*first, *[9] * said], "turn_start": start}
        tokens, logprobs, end = alone(chunk(new=4096, **turn))
        assert (end.finish, end.stop_reason) == ("stop", str(tokens[-1]))
        assert (tokens, logprobs) == tuple(each[start - 3 :][: len(tokens)] for each in every[:2])
        lengths.add(len(tokens))
    assert len(lengths) > 4


def test_limits_count_from_where_the_turn_begins():
    turn = {"output": [9] * 20, "turn_start": 3 + 18}
    for sampling, finish in (
        ({"max_tokens": 9}, "length"),
        ({"max_tokens": 9, "ignore_eos": True}, "length"),
    ):
        tokens, _, end = alone(chunk(new=7, **turn, **sampling))
        assert (len(tokens), end.finish, end.stop_reason) == (7, finish, "")
    with pytest.raises(InvalidField, match="max_new_tokens"):
        backend().add(chunk(new=8, max_tokens=9, **turn))
    natural = len(alone(chunk(new=4000, **turn))[0])
    tokens, _, end = alone(chunk(new=4000, min_tokens=natural + 7, **turn))
    assert (len(tokens), end.finish) == (natural + 5, "stop")


# --- traces ----------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"

    def write(*lines):
        path.write_text("\n".join(json.dumps(line) for line in lines))
        return str(path)

    return write


def test_a_trace_is_replayed_by_prompt_and_index(trace):
    path = trace(
        {"id": "a/b", "token_ids": [1, 2, 3], "logprobs": [-1, -2, -3]},
        {"id": "a/b", "index": 4, "token_ids": [7, 8]},
        {"id": "c", "token_ids": [9]},
    )
    told = {}
    for index in (0, 4, 1, 2):
        tokens, logprobs, end = alone(chunk(index, prompt_id="a/b", new=2), trace=path)
        told[index] = (tokens, end.finish)
        assert index or logprobs == [-1, -2]
    assert told == {0: ([1, 2], ""), 4: ([7, 8], "stop"), 1: ([7, 8], "stop"), 2: ([1, 2], "")}
    assert alone(chunk(prompt_id="a/b", output=[1, 2]), trace=path)[0] == [3]
    assert alone(chunk(prompt_id="a/b", new=2, max_tokens=2), trace=path)[2].finish == "length"


def test_a_trace_is_cut_by_max_tokens_and_by_nothing_else(trace):
    path = trace({"id": "p", "token_ids": [1, 2]})
    for sampling in ({"min_tokens": 5}, {"ignore_eos": True}):
        tokens, _, end = alone(chunk(new=9, **sampling), trace=path)
        assert (tokens, end.finish) == ([1, 2], "stop")


def test_a_trace_has_no_second_turn(trace):
    engine = backend(trace=trace({"id": "p", "token_ids": [1, 2]}))
    with pytest.raises(InvalidField, match="turn_start = 5: a trace has responses of one turn"):
        engine.add(chunk(output=[1, 2], turn_start=5))


def test_a_prompt_that_was_not_recorded_is_refused(trace):
    engine = backend(trace=trace({"id": "a", "token_ids": [1]}))
    with pytest.raises(InvalidField, match="prompt id = 'p'"):
        engine.add(chunk())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"id": "a"}, "line 1.*token_ids"),
        ({"id": "a", "token_ids": []}, "line 1.*1 or more"),
        ({"id": "a", "token_ids": [1000]}, r"replay\.vocab_size = 1000"),
        ({"id": "a", "token_ids": [1], "logprobs": []}, "one entry per token"),
        ({"id": "a", "token_ids": [1], "tokens": 3}, "tokens"),
    ],
)
def test_a_bad_trace_names_its_line(trace, line, problem):
    with pytest.raises(EngineError, match=problem):
        backend(trace=trace(line))


def test_a_trace_that_is_missing_or_repeats_itself_is_refused(trace, tmp_path):
    with pytest.raises(EngineError, match=r"engine\.replay\.trace"):
        backend(trace=str(tmp_path / "none"))
    line = {"id": "a", "index": 2, "token_ids": [1]}
    with pytest.raises(EngineError, match="line 2: index 2"):
        backend(trace=trace(line, line))


# --- batching and memory ---------------------------------------------------------------------


def test_capacity_is_the_usable_blocks():
    assert backend(kv_blocks=10, max_num_seqs=3).capacity == Capacity(
        kv_blocks=10, block_size=BLOCK, max_num_seqs=3, max_model_len=10 * BLOCK - 1, image_tokens=1024
    )


def test_steps_take_the_modelled_time_of_their_batch():
    engine = backend(step_seconds=0.5, row_seconds=0.125)
    for index in range(3):
        engine.add(chunk(index, new=2, ignore_eos=True))
    assert engine.step().seconds == 0.875
    stats = engine.stats()
    assert (stats.steps, stats.running, stats.generated_tokens, stats.prompt_tokens) == (1, 3, 3, 9)


def test_admission_is_first_come_first_served_and_bounded_by_sequences_and_memory():
    engine = backend(kv_blocks=3, max_num_seqs=2)
    for index, prompt in enumerate([(1,) * 3, (1,) * 3, (1,) * 3]):
        engine.add(chunk(index, prompt, new=1))
    assert [news.request_id[-1] for news in engine.step().generated] == ["0", "1"]
    engine.add(chunk(3, (1,) * 9, new=1))
    engine.add(chunk(4, (1,), new=1))
    assert [news.request_id[-1] for news in engine.step().generated] == ["2"]
    assert [news.request_id[-1] for news in engine.step().generated] == ["3"]


def test_growth_preempts_the_last_admitted_which_is_computed_again():
    engine = backend(kv_blocks=4, max_num_seqs=4)
    for index in range(2):
        engine.add(chunk(index, (1,) * 7, new=8, ignore_eos=True))
    _, ends = run(engine)
    assert {name[-1]: end.preemptions for name, end in ends.items()} == {"0": 0, "1": 1}
    stats = engine.stats()
    assert stats.preemptions == 1
    assert stats.prompt_tokens == 7 + 7 + 8
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, 4)


def test_chunks_placed_by_the_books_are_never_preempted():
    engine = backend(kv_blocks=40, max_num_seqs=8)
    free = engine.capacity.kv_blocks
    for index in range(8):
        item = chunk(index, (1,) * (index + 1), new=10, ignore_eos=True)
        free -= engine.capacity.blocks_for(index + 1, 10)
        engine.add(item)
    assert free >= 0
    run(engine)
    assert engine.stats().preemptions == 0


def test_dropping_and_replacing_frees_what_was_held():
    engine = backend(kv_blocks=16)
    engine.add(chunk(0, new=20, ignore_eos=True))
    engine.step()
    engine.drop("r/p#0", 7)
    assert engine.has_work()
    engine.add(chunk(0, new=3, attempt=2, ignore_eos=True))
    outputs, ends = run(engine)
    assert (len(outputs["r/p#0"][0]), ends["r/p#0"].attempt) == (3, 2)
    engine.add(chunk(1))
    engine.drop("r/p#1", 1)
    assert not engine.has_work()
    assert engine.step().generated == []
    assert engine.stats().free_blocks == 16


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (chunk(prompt=()), "prompt_len"),
        (chunk(new=0), "max_new_tokens"),
        (chunk(new=5, max_tokens=4), "max_new_tokens"),
        (chunk(new=60), "max_model_len"),
        (chunk(prompt=(1, 1000)), "tokens"),
        (chunk(prompt=(-1, 1)), "tokens"),
        (chunk(turn_start=2), "turn_start"),
        (structs.replace(chunk(), key=-1), "key"),
        (structs.replace(chunk(), key=2**64), "key"),
    ],
)
def test_impossible_chunks_are_refused_by_field(item, field):
    with pytest.raises(InvalidField, match=field):
        backend(kv_blocks=15).add(item)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kv_blocks": 3, "max_model_len": 100}, "kv_blocks = 3"),
        ({"kv_blocks": 0}, "kv_blocks = 0"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, problem):
    with pytest.raises((ConfigError, EngineError), match=problem):
        backend(**settings)


def test_the_kv_model_refuses_what_could_never_run():
    model = KvModel(blocks=2, block_size=4, max_num_seqs=1)
    model.add(Sequence("fits", 1, 8))
    for length, end in ((1, 9), (3, 3)):
        with pytest.raises(ValueError, match="does not fit"):
            model.add(Sequence("not", length, end))
