"""Responses with several turns under the real engine.

Invariants:
- a turn gives what a request gives whose prompt is the context so far, to the last bit of its logprobs, wherever
  and however it runs;
- the KV of a turn that parks reaches the pool, and no KV that is not of its tokens.
"""

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_cases import EOS, KEY, Response, chunk

pytest.importorskip("mooncake.store", reason="needs Mooncake and libibverbs1", exc_type=ImportError)

from pool_alone import pool_alone
from tokenizers import Tokenizer
from turn_engines import EngineProcess

from seer.common.config import PoolConfig
from seer.common.types import SamplingParams
from seer.services.engine.vllm.drafts.draft_script import DraftScript

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "countdown"
MODEL = EXAMPLE / "model"
VOCAB = 66
COUNT, TURNS = 12, 5
BLOCK = 32
NO_DRAFTS = DraftScript(kind="none", vocab=VOCAB)

STOP = 55
"""The token of "=": the model writes it every ten tokens or so."""

CASES = {
    "stop ids": SamplingParams(
        max_tokens=12, temperature=1.3, stop_token_ids=(STOP, 57), ignore_eos=True
    ),
    "everything": SamplingParams(
        max_tokens=12, temperature=1.2, top_p=0.95, top_k=40, min_p=0.01, repetition_penalty=1.2,
        frequency_penalty=0.3, presence_penalty=0.2, logit_bias={30: 1.0}, min_tokens=5, stop_token_ids=(STOP, 57),
    ),
    "stop strings": SamplingParams(
        max_tokens=24, temperature=1.1, min_tokens=3, stop=("= 1", "! 2", "47 -"), ignore_eos=True
    ),
}  # fmt: skip
"""Turns end by each kind of stop, and at their limit; EOS counts in one case."""

WAYS = {
    "KV kept": {},
    "caches emptied": {"empty": True},
    "chunks of 7": {"chunk_size": 7},
    "chunks of 7, caches emptied": {"chunk_size": 7, "empty": True},
    "drafts": {"drafts": "grouped"},
    "drafts, chunks of 7, caches emptied": {"drafts": "grouped", "chunk_size": 7, "empty": True},
    "right drafts": {"drafts": "right"},
    "each turn in another engine": {"move": True},
    "each turn in another engine, drafts": {"move": True, "drafts": "grouped"},
}
"""Where and how the same turns run: arguments of `Engines.play`."""


class Trajectory(msgspec.Struct):
    """One response: its context so far, where each turn's output began, and what the turns gave."""

    index: int
    context: list[int]
    prompt_len: int
    starts: list[int] = []
    turns: list[Response] = []

    @property
    def turn_ended(self) -> bool:
        return bool(self.turns[-1].ends) and self.turns[-1].finish[0] != ""

    def begin(self, said: list[int]) -> None:
        """Add what an environment said, and begin a turn."""
        self.context = self.context + said
        self.starts = [*self.starts, len(self.context)]
        self.turns = [*self.turns, Response()]

    def add(self, part: Response) -> None:
        """Add what a chunk gave."""
        self.context = self.context + part.tokens
        turn = self.turns[-1]
        turn.tokens, turn.logprobs = turn.tokens + part.tokens, turn.logprobs + part.logprobs
        turn.ends = turn.ends + part.ends

    @property
    def told(self) -> list[tuple[list[int], list[float], tuple[str, str]]]:
        return [(turn.tokens, turn.logprobs, turn.finish) for turn in self.turns]


def tool(trajectory: Trajectory) -> list[int]:
    """Return what an environment says: a function of the context."""
    said = hashlib.blake2b(bytes(trajectory.context), digest_size=60).digest()
    return [4 + byte % (VOCAB - 4) for byte in said[: 8 + said[0] % 20]]


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:3]
    each = [tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False).ids for line in lines]
    return [prompt + [4 + (7 * i) % 60 for i in range(40)] + prompt for prompt in each]  # over a block


class Engines:
    """Two engines that may share a pool, and what they run turn by turn."""

    def __init__(self, pool: PoolConfig, profiles: Path, ahead: bool) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.each = [EngineProcess(MODEL, pool, profiles, cores[i % len(cores)], ahead) for i in range(2)]
        self._plays = 0
        self._expected: dict[str, list[Trajectory]] = {}

    def anew(self, *, share: bool = False) -> str:
        """Have engines without any KV, which may `share` it from now on; return a name for a group."""
        self._plays += 1
        name = f"play {self._plays}"
        for engine in self.each:
            engine.empty()
            engine.bind_weights(name if share else "")
            engine.script_drafts(NO_DRAFTS)
        return name

    def expected(self, case: str) -> list[Trajectory]:
        """Return what turns must give: each as a request of its own, whose prompt is the context so far."""
        if case not in self._expected:
            self._expected[case] = self.play(CASES[case], as_new=True)
        return self._expected[case]

    def play(
        self, sampling: SamplingParams, *, turns: int = TURNS, chunk_size: int = 10_000, move: bool = False,
        empty: bool = False, drafts: str = "", known: Sequence[Trajectory] = (), parks: bool = True,
        as_new: bool = False, say: Callable[[Trajectory], list[int]] = tool, shift: int = 0,
    ) -> list[Trajectory]:  # fmt: skip
        """Run all trajectories; nothing has KV of an earlier play.

        `move`: each turn in the other engine, which has no KV but the pool's. `empty`: each turn without any
        KV. Right `drafts` are of what is `known`. `as_new`: each turn is a request whose prompt is the context
        so far. `shift`: turns are said to begin so many tokens too early.
        """
        name = self.anew(share=move)
        scripts = {"grouped": None, "": NO_DRAFTS, "right": right_drafts(known)}
        for engine in self.each:
            engine.script_drafts(scripts[drafts])
        played = [Trajectory(i, prompt, len(prompt)) for i, prompt in enumerate(prompts() * (COUNT // 3))]
        for turn in range(turns):
            engine = self.each[turn % 2 if move else 0]
            if empty or move:
                engine.empty()
            for one in played:
                one.begin(say(one) if turn else [])
            while running := [one for one in played if not one.turn_ended]:
                chunks = [
                    chunk(
                        f"{name}#{one.index}", sampling, key=KEY + one.index, index=one.index, group_id=name,
                        prompt_len=one.starts[-1] if as_new else one.prompt_len, max_new_tokens=chunk_size,
                        tokens=one.context, turn_start=one.starts[-1] - shift if turn and not as_new else 0,
                        parks=parks,
                    )
                    for one in running
                ]  # fmt: skip
                ended = engine.run(chunks)
                for one in running:
                    one.add(ended[f"{name}#{one.index}"])
        return played

    def total(self, counter: str) -> list[int]:
        """Return a counter of `InstanceStats` of each engine."""
        return [getattr(engine.stats(), counter) for engine in self.each]


def right_drafts(known: Sequence[Trajectory]) -> DraftScript:
    """Return what drafts all that is known, and goes on after a stop as if there were none."""
    return DraftScript(
        kind="right", vocab=VOCAB, count=5, known={one.index: one.context[one.prompt_len :] for one in known}
    )


@contextlib.contextmanager
def engines_with_pool(profiles: Path, *, ahead: bool = False) -> Iterator[Engines]:
    with pool_alone(MODEL) as pool:
        started = Engines(pool, profiles, ahead)
        try:
            for engine in started.each:
                engine.ready()
            yield started
        finally:
            for engine in started.each:
                engine.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engines_with_pool(tmp_path_factory.mktemp("profiles")) as started:
        yield started


@pytest.mark.breadth
def test_engines_that_schedule_ahead_share_kv(engines: Engines, tmp_path: Path) -> None:
    """`test_async_scheduling.py` has them without a pool."""
    with engines_with_pool(tmp_path, ahead=True) as others:
        for case, sampling in CASES.items():
            expected = [[(tokens, end) for tokens, _, end in one.told] for one in engines.expected(case)]
            for way in ("KV kept", "chunks of 7, caches emptied", "each turn in another engine"):
                before = sum(others.total("pool_tokens"))
                played = others.play(sampling, **WAYS[way])
                assert [[(tokens, end) for tokens, _, end in one.told] for one in played] == expected
                assert (sum(others.total("pool_tokens")) > before) == ("move" in WAYS[way])


@pytest.mark.parametrize(("case", "way"), [(case, way) for case in CASES for way in WAYS])
def test_where_and_how_turns_run_changes_neither_tokens_nor_logprobs(
    engines: Engines, case: str, way: str
) -> None:
    expected = engines.expected(case)
    for last in (False, False, True):
        before = [engines.total(name) for name in ("pool_tokens", "drafted_tokens", "accepted_tokens")]
        played = engines.play(CASES[case], known=expected, **WAYS[way])
        after = [engines.total(name) for name in ("pool_tokens", "drafted_tokens", "accepted_tokens")]
        assert [one.told for one in played] == [one.told for one in expected]
        pulled, drafted, accepted = np.subtract(after, before)
        if pulled.all() or "move" not in WAYS[way] or last:
            break  # else leases of the pool expired on a busy machine: an engine then computes again
    assert all((pulled > 0) == ("move" in WAYS[way]))
    assert (sum(accepted) > 0) == ("drafts" in WAYS[way])
    if WAYS[way].get("drafts") == "right":
        assert sum(accepted) > sum(drafted) / 2  # those after a stop do not count


@pytest.mark.parametrize("case", CASES)
def test_cases_have_turns_of_many_lengths_that_end_in_all_ways(engines: Engines, case: str) -> None:
    turns = [turn for one in engines.expected(case) for turn in one.turns]
    assert {turn.finish[0] for turn in turns} == {"stop", "length"}
    assert (str(EOS) in {turn.finish[1] for turn in turns}) == (case == "everything")
    assert len({len(turn.tokens) for turn in turns}) > 5


@pytest.mark.parametrize("case", CASES)
def test_another_word_of_the_environment_changes_what_follows_and_nothing_before(
    engines: Engines, case: str
) -> None:
    def other(one: Trajectory) -> list[int]:
        said = tool(one)
        if len(one.turns) == 2:
            said[-1] = 4 + (said[-1] - 3) % (VOCAB - 4)
        return said

    expected = engines.expected(case)
    for one, same in zip(engines.play(CASES[case], say=other), expected, strict=True):
        assert one.told[:2] == same.told[:2]
        assert one.turns[2].logprobs != same.turns[2].logprobs


@pytest.mark.parametrize("case", CASES)
def test_a_turn_that_is_said_to_begin_elsewhere_is_another_one(engines: Engines, case: str) -> None:
    played = engines.play(CASES[case], shift=4)
    assert [one.told for one in played] != [one.told for one in engines.expected(case)]


@pytest.mark.parametrize("way", ["KV kept", "each turn in another engine"])
def test_a_tool_that_writes_what_the_model_would_have_gives_what_one_go_gives(
    engines: Engines, way: str
) -> None:
    """The repetition penalty sees all that is before, whoever wrote it."""
    sampling = SamplingParams(
        max_tokens=70, temperature=1.1, top_p=0.95, repetition_penalty=1.2, ignore_eos=True
    )
    whole = engines.play(sampling, turns=1)

    def as_the_model(one: Trajectory) -> list[int]:
        done = len(one.context) - one.prompt_len
        return whole[one.index].turns[0].tokens[done : done + 3]

    stops = msgspec.structs.replace(sampling, stop_token_ids=(STOP, 58, 52))
    for one, same in zip(engines.play(stops, say=as_the_model, **WAYS[way]), whole, strict=True):
        assert one.context == same.context[: len(one.context)]
        assert len(set(one.starts)) == TURNS
        for start, turn in zip(one.starts, one.turns, strict=True):
            since = start - one.prompt_len
            assert turn.logprobs == same.turns[0].logprobs[since:][: len(turn.logprobs)]


@pytest.mark.parametrize(
    ("ends", "sampling"),
    [("stop", SamplingParams(max_tokens=150, stop_token_ids=(STOP,), ignore_eos=True)),
     ("stop", SamplingParams(max_tokens=150, stop=("=",), ignore_eos=True)),
     ("length", SamplingParams(max_tokens=20, ignore_eos=True))],
    ids=["stop id", "stop string", "limit"],
)  # fmt: skip
def test_a_turn_finds_the_kv_of_those_before_only_if_they_were_parked(
    engines: Engines, ends: str, sampling: SamplingParams
) -> None:
    """The first engine runs the first turn, which finds nothing, and the third, which finds the second one's KV."""

    def play(*, parks: bool) -> tuple[np.ndarray, bool]:
        """Return how many tokens each engine had of the pool, and whether turns had all that was before them."""
        before = engines.total("pool_tokens")
        played = engines.play(sampling, turns=3, move=True, parks=parks)
        assert {turn.finish[0] for one in played for turn in one.turns} == {ends}
        pairs = [
            pair for one in played for pair in itertools.pairwise(zip(one.starts, one.turns, strict=True))
        ]
        # Siblings may find their prompt's KV at each other, but nobody has a turn's but the pool.
        found = all(
            turn.ends[0].cached_tokens >= (start + len(earlier.tokens) - 1) // BLOCK * BLOCK
            for (start, earlier), (_, turn) in pairs
        )
        return np.subtract(engines.total("pool_tokens"), before), found

    for _ in range(3):
        pulled, found = play(parks=True)
        if found and pulled.all():
            break
        time.sleep(2.0)  # leases of the pool expire on a busy machine, and the pool is not used for a while
    assert found
    assert pulled.all()
    pulled, _ = play(parks=False)
    assert not pulled.any()


def test_blocks_of_a_parked_response_stay_in_the_pool(engines: Engines) -> None:
    for parks in (True, False):
        engines.play(CASES["stop ids"], turns=3, move=True, parks=parks)
        assert (sum(engine.blocks_to_remove() for engine in engines.each) == 0) == parks


def test_where_drafts_run_past_a_stop_only_the_tokens_before_are_saved(engines: Engines) -> None:
    """The stop is the last token but one of a block, and right drafts reach into the next one."""
    first, second = engines.each
    sampling = SamplingParams(
        max_tokens=99, logit_bias={STOP: 100.0}, stop_token_ids=(STOP,), ignore_eos=True
    )
    turns = {}
    for index, least in enumerate(range(40, 46)):
        prompt = prompts()[0]
        prompt += prompt[: (BLOCK - 2 - least - len(prompt)) % BLOCK]
        turns[str(index)] = chunk(
            str(index), msgspec.structs.replace(sampling, min_tokens=least), prompt=prompt, index=index,
            key=KEY + index, group_id="past", parks=True,
        )  # fmt: skip
    engines.anew()
    expected = second.run(list(turns.values()))
    engines.anew(share=True)
    known = {one.index: expected[name].tokens + [STOP] * 9 for name, one in turns.items()}
    first.script_drafts(DraftScript(kind="right", vocab=VOCAB, count=5, known=known))
    first.saves()
    assert told(first.run(list(turns.values()))) == told(expected)
    saves = first.saves()
    assert {len(one.tokens) + len(expected[name].tokens) for name, one in turns.items()} & {95, 127}
    assert any(computed // BLOCK * BLOCK > known for _, known, computed in saves), saves
    assert all(tokens == known // BLOCK * BLOCK for tokens, known, _ in saves), saves
    again = [
        chunk(
            name, CASES["everything"], tokens=[*one.tokens, *expected[name].tokens, 9, 9, 9], index=one.index,
            key=one.key, group_id="past", prompt_len=one.prompt_len,
            turn_start=len(one.tokens) + len(expected[name].tokens) + 3,
        )
        for name, one in turns.items()
    ]  # fmt: skip
    before = second.stats().pool_tokens
    after = second.run(again)
    assert second.stats().pool_tokens > before
    engines.anew()
    assert told(second.run(again)) == told(after)


def told(responses: dict[str, Response]) -> dict[str, tuple[list[int], list[float], tuple[str, str]]]:
    return {name: (one.tokens, one.logprobs, one.finish) for name, one in responses.items()}
