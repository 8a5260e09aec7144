"""Whatever the chunking, batching and memory: the same tokens, and never more memory than there is."""

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seer.common.config import EngineConfig, ReplayConfig, SharedConfig
from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk
from seer.services.engine.replay.backend import ReplayBackend
from seer.services.engine.replay.kv_model import KvModel, Sequence

BLOCK = 4
REQUESTS = 6


def backend(kv_blocks, max_num_seqs):
    config = EngineConfig(
        backend="replay",
        kv_blocks=kv_blocks,
        max_num_seqs=max_num_seqs,
        replay=ReplayConfig(vocab_size=50, mean_tokens=20),
    )
    made = ReplayBackend(config, SharedConfig(block_size=BLOCK))
    made.start()
    return made


def chunk(index, output, new, sampling):
    prompt = [index % 2] * (1 + index % 2)
    return Chunk(
        request_id=f"r/p#{index}",
        group_id="r/p",
        attempt=len(output),
        key=index * 2**61 + 17,
        prompt_len=len(prompt),
        max_new_tokens=min(new, sampling.max_tokens - len(output)),
        sampling=sampling,
        tokens=prompt + output,
    )


def responses(engine, sizes, sampling):
    """Run all requests at once, cut as `sizes` says (cyclically); return their tokens and finishes."""
    whole = {f"r/p#{index}": ([], []) for index in range(REQUESTS)}
    finishes, turn = {}, 0
    for index in range(REQUESTS):
        engine.add(chunk(index, [], sizes[index % len(sizes)], sampling))
    while engine.has_work():
        out = engine.step()
        for news in out.generated:
            assert len(news.token_ids) == len(news.logprobs)
            whole[news.request_id][0].extend(news.token_ids)
            whole[news.request_id][1].extend(news.logprobs)
        for end in out.ended:
            if end.finish:
                finishes[end.request_id] = (end.finish, end.stop_reason)
            else:
                turn += 1
                output = whole[end.request_id][0]
                assert len(output) < sampling.max_tokens
                engine.add(chunk(int(end.request_id[-1]), output, sizes[turn % len(sizes)], sampling))
    return whole, finishes


@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    kv_blocks=st.integers(17, 60),
    max_num_seqs=st.integers(1, REQUESTS),
    max_tokens=st.integers(1, 60),
    min_tokens=st.integers(0, 20),
)
@settings(max_examples=100)
def test_any_schedule_gives_the_same_responses(sizes, kv_blocks, max_num_seqs, max_tokens, min_tokens):
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
    engine = backend(kv_blocks, max_num_seqs)
    got = responses(engine, sizes, sampling)
    assert got == responses(backend(1000, REQUESTS), [max_tokens], sampling)
    stats = engine.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (kv_blocks, 0, 0)
    assert stats.generated_tokens == sum(len(tokens) for tokens, _ in got[0].values())


def turns(engines, size, said, sampling):
    """Run a response in turns of chunks of `size`, each chunk in the next engine; return its context and ends."""
    context, finishes, placed = [0], [], 0
    for count in [0, *said]:
        context += [7] * count
        start, finish = len(context), ""
        while not finish:
            engine, placed = engines[placed % len(engines)], placed + 1
            left = sampling.max_tokens - (len(context) - start)
            engine.add(
                Chunk(
                    request_id="r/p#0", group_id="r/p", attempt=placed, key=17, prompt_len=1,
                    max_new_tokens=min(size, left), sampling=sampling, tokens=list(context), turn_start=start,
                    parks=True,
                )
            )  # fmt: skip
            while engine.has_work():
                out = engine.step()
                context += [token for news in out.generated for token in news.token_ids]
                for end in out.ended:
                    finish = end.finish
        finishes.append((len(context) - start, finish))
    return context, finishes


@given(
    size=st.integers(1, 70),
    said=st.lists(st.integers(1, 9), max_size=4),
    max_tokens=st.integers(1, 60),
    min_tokens=st.integers(0, 20),
)
@settings(max_examples=50)
def test_any_schedule_gives_the_same_turns(size, said, max_tokens, min_tokens):
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
    got = turns([backend(1000, 2), backend(1000, 2)], size, said, sampling)
    assert got == turns([backend(1000, 2)], max_tokens, said, sampling)
    for count, finish in got[1]:
        assert sampling.min_tokens <= count <= max_tokens
        assert finish == "stop" or count == max_tokens


class KvMachine(RuleBasedStateMachine):
    """The allocator under any load: never over, never stuck, first come first served."""

    blocks, seats = 12, 3

    def __init__(self):
        super().__init__()
        self.model = KvModel(self.blocks, BLOCK, self.seats)
        self.known = []
        self.added = 0

    @rule(length=st.integers(1, 20), new=st.integers(1, 27))
    def add(self, length, new):
        self.added += 1
        self.known.append(Sequence(str(self.added), length, length + new))
        self.model.add(self.known[-1])

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data):
        sequence = data.draw(st.sampled_from(self.known))
        self.model.remove(sequence)
        self.known.remove(sequence)

    @precondition(lambda self: self.known)
    @rule(most=st.integers(1, 9))
    def step(self, most):
        before = {sequence: sequence.length for sequence in self.known}
        first = self.model.running[:1]
        step = self.model.step(most)
        assert step.ran
        assert 1 <= step.steps <= most
        assert all(sequence.length - before[sequence] == step.steps for sequence in step.ran)
        assert all(sequence.length <= sequence.end for sequence in step.ran)
        assert set(step.ended) == {sequence for sequence in self.known if sequence.length == sequence.end}
        assert first == [] or first[0] in step.ran
        self.known = [sequence for sequence in self.known if sequence not in step.ended]

    @invariant()
    def memory_is_accounted_for(self):
        model = self.model
        assert all(sequence.blocks >= 0 for sequence in self.known)
        assert sum(sequence.blocks for sequence in model.running) + model.free == self.blocks
        assert model.free >= 0
        assert all(sequence.blocks == 0 for sequence in model.waiting)

    @invariant()
    def every_sequence_is_in_one_place_and_in_order(self):
        places = [*self.model.running, *self.model.waiting]
        assert sorted(map(id, places)) == sorted(map(id, self.known))
        assert len(self.model.running) <= self.seats
        assert [int(sequence.name) for sequence in places] == sorted(int(s.name) for s in places)


KvMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestKvModel = KvMachine.TestCase


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=8),
    most=st.integers(2, 50),
)
@settings(max_examples=100)
def test_several_steps_at_once_are_the_same_steps(lengths, most):
    def history(most):
        model = KvModel(20, BLOCK, 4)
        for number, (length, new) in enumerate(lengths):
            model.add(Sequence(str(number), length, length + new))
        steps, ends, prefilled = 0, [], 0
        while model.running or model.waiting:
            step = model.step(most)
            steps += step.steps
            prefilled += step.prefilled
            ends += [(steps, sequence.name, sequence.preemptions) for sequence in step.ended]
        return steps, ends, prefilled, model.preemptions

    assert history(most) == history(1)
