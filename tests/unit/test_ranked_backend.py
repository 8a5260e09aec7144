"""An engine of data-parallel ranks, with backends that are no model, each in a process of its own."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_backends
from living import alive, wait_for

from seer.common.errors import EngineBroken, EngineError
from seer.common.policy.ranks import AHEAD
from seer.common.sleep import SleepState
from seer.common.types import InstanceStats, SamplingParams
from seer.services.engine.backend import Chunk, StepOutput
from seer.services.engine.ranked import RankedBackend, merged_stats

RANKS = 3


@pytest.fixture
def engines():
    made: list[RankedBackend] = []

    def make(log: Path, faulty: int = -1, fault: str = "", at: int = 0, **limits: float) -> RankedBackend:
        making = functools.partial(rank_backends.make, faulty, fault, at, log)
        made.append(RankedBackend(making, RANKS, limits.pop("seconds", 30.0), **limits))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def chunk(name: str, tokens: int = 20, known: int = 5, attempt: int = 0) -> Chunk:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Chunk(
        request_id=name, group_id="g", attempt=attempt, key=7, prompt_len=known, max_new_tokens=tokens,
        sampling=sampling, tokens=list(range(known)),
    )  # fmt: skip


def run(engine: RankedBackend) -> tuple[dict[str, int], list[StepOutput]]:
    """Step until there is no work; return how many tokens each request got."""
    tokens: dict[str, int] = {}
    outputs = []
    while engine.has_work():
        outputs.append(engine.step())
        for new in outputs[-1].generated:
            tokens[new.request_id] = tokens.get(new.request_id, 0) + len(new.token_ids)
    return tokens, outputs


def told(log: Path) -> list[list[str]]:
    return [(log / f"rank-{rank}").read_text().split("\n")[1:-1] for rank in range(RANKS)]


def test_ranks_run_the_same_steps_and_hear_all_in_the_same_place(engines, tmp_path):
    engine = engines(tmp_path)
    engine.start()
    assert (engine.capacity.kv_blocks, engine.capacity.parts) == (RANKS * rank_backends.BLOCKS, RANKS)
    assert engine.capacity.max_num_seqs == RANKS * 4
    assert engine.versions["data_parallel"] == str(RANKS)
    engine.add(chunk("one"))
    engine.add(chunk("two", tokens=9))
    tokens, outputs = run(engine)
    assert all(1 <= tokens[name] <= most for name, most in (("one", 20), ("two", 9)))
    assert sorted(end.request_id for output in outputs for end in output.ended) == ["one", "two"]
    steps = len(outputs)
    engine.load_weights(tmp_path, "new")
    engine.sleep(SleepState.ASLEEP, 1)
    engine.forget(["a", "b"])
    engine.add(chunk("three"))
    run(engine)
    first = told(tmp_path)[0]
    assert first[: steps + 3] == ["step"] * steps + ["load new", "sleep 1", "forget a,b"]
    assert told(tmp_path) == [first] * RANKS
    lockstep = engine.lockstep
    assert lockstep.ran == RANKS * lockstep.granted == RANKS * first.count("step")
    assert lockstep.dummies >= lockstep.granted, "one rank at least had nothing to do"


def test_all_ranks_have_the_drafts_that_the_one_with_most_chunks_wants(engines, tmp_path):
    engine = engines(tmp_path)
    engine.start()
    for name in ("one", "two", "three", "four"):
        engine.add(chunk(name, tokens=30))
    (most,) = [rank for rank, chunks in enumerate(engine._placement.chunks) if chunks == 2]
    engine.step()
    run(engine)
    drafts = [(tmp_path / f"drafts-{rank}").read_text().split() for rank in range(RANKS)]
    assert drafts == [drafts[0]] * RANKS
    assert drafts[0][:5] == ["0"] * AHEAD + [str(10 + most)] * (5 - AHEAD), "known from the first report on"


def test_a_dropped_chunk_is_not_heard_of_and_its_request_may_come_back(engines, tmp_path):
    engine = engines(tmp_path)
    engine.start()
    engine.add(chunk("one"))
    engine.step()  # the next one is under way
    engine.drop("one", 0)
    engine.add(chunk("one", attempt=1))
    tokens, outputs = run(engine)
    assert {new.attempt for output in outputs for new in output.generated} == {1}
    assert [end.attempt for output in outputs for end in output.ended] == [1]
    assert engine._placement.free == [rank_backends.BLOCKS] * RANKS
    assert tokens["one"] >= 1


def test_chunks_that_are_told_to_end_where_they_stand_do_and_others_go_on(engines, tmp_path):
    engine = engines(tmp_path)
    engine.start()
    for name in ("one", "two", "three", "four"):
        engine.add(chunk(name, tokens=30))
    before = engine.step()
    assert {"one", "two"} < {new.request_id for new in before.generated}
    engine.end("three", 1)  # another attempt
    for name in ("one", "two", "unknown"):
        engine.end(name, 0)
    tokens, outputs = run(engine)
    ends = {end.request_id: end.finish for output in outputs for end in output.ended}
    assert {name for name, finish in ends.items() if not finish} == {"one", "two"}
    assert max(tokens["one"], tokens["two"]) < min(tokens["three"], tokens["four"])
    assert not engine.has_work()


def test_a_chunk_that_a_rank_refuses_harms_no_other(engines, tmp_path):
    engine = engines(tmp_path)
    engine.start()
    engine.add(chunk("long", known=301))
    engine.add(chunk("good"))
    tokens, outputs = run(engine)
    (failure,) = [failure for output in outputs for failure in output.failed]
    assert (failure.request_id, failure.error.field) == ("long", "tokens")
    assert tokens.keys() == {"good"}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("dies", "rank 1 of this engine has ended"),
        ("fails", "rank 1: .*no numbers"),
        ("is full", "rank 1: .*No space left"),
    ],
)
def test_a_rank_that_ends_ends_the_engine_and_all_ranks(engines, tmp_path, fault, says):
    engine = engines(tmp_path, 1, fault, 3)
    engine.start()
    engine.add(chunk("one"))
    with pytest.raises(EngineError, match=says):
        run(engine)
    engine.close()
    assert all(gone(tmp_path, rank) for rank in range(RANKS))


def test_a_rank_that_ended_while_there_was_no_work_ends_the_engine_with_the_next_chunk(engines, tmp_path):
    engine = engines(tmp_path)
    engine.start()
    engine._processes[0].kill()
    engine._processes[0].join()
    with pytest.raises(EngineBroken, match="rank 0"):
        engine.add(chunk("one"))
    with pytest.raises(EngineBroken, match="rank 0"):
        run(engine)


def test_a_rank_that_stands_still_is_named_and_killed(engines, tmp_path):
    engine = engines(tmp_path, 2, "hangs", 3, step_seconds=1.5)
    engine.start()
    engine.add(chunk("one"))
    begun = time.monotonic()
    with pytest.raises(EngineBroken, match=r"ranks \[2\] of this engine did not end a step in time"):
        run(engine)
    engine.close()
    assert time.monotonic() - begun < 20
    assert all(gone(tmp_path, rank) for rank in range(RANKS))


def test_a_rank_that_takes_no_orders_is_named_and_killed(engines, tmp_path):
    engine = engines(tmp_path, step_seconds=1.5)
    engine.start()
    os.kill(engine._processes[1].pid, signal.SIGSTOP)
    with pytest.raises(EngineBroken, match="rank 1 of this engine takes no orders"):
        for _ in range(100):
            engine.forget(["g" * 100_000])  # more than a pipe holds
    engine.close()
    assert all(gone(tmp_path, rank) for rank in range(RANKS))


def gone(log: Path, rank: int) -> bool:
    try:
        os.kill(int((log / f"rank-{rank}").read_text().split("\n")[0]), 0)
    except ProcessLookupError:
        return True
    return False


def test_a_rank_that_cannot_start_says_why_and_a_load_that_fails_does(engines, tmp_path):
    with pytest.raises(EngineError, match=r"rank 1: .*cannot be loaded"):
        engines(tmp_path, 1, "start").start()
    engine = engines(tmp_path, 2, "load")
    engine.start()
    with pytest.raises(EngineBroken, match="the weights are gone"):
        engine.load_weights(tmp_path, "new")


def test_statistics_add_up_or_are_the_slowest_rank_s(engines, tmp_path):
    one, two = InstanceStats(steps=5, running=2, step_seconds=1.0), InstanceStats(steps=4, pool_away=True)
    assert merged_stats([one, two]) == InstanceStats(steps=5, running=2, step_seconds=1.0, pool_away=True)
    engine = engines(tmp_path)
    engine.start()
    assert (engine.stats().running, engine.stats().generated_tokens) == (6, 30)


ORPHAN = """
import functools, multiprocessing, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import rank_backends
from seer.services.engine.rank_process import serve
context = multiprocessing.get_context("spawn")
ours, theirs = context.Pipe()
make = functools.partial(rank_backends.make, 0, "start slowly", 0, Path(sys.argv[2]))
rank = context.Process(target=serve, args=(theirs, make, 0, 1))
rank.start()
print(rank.pid, flush=True)
os._exit(9)  # before the rank runs a line
"""


def test_a_rank_ends_with_an_engine_that_ended_before_the_rank_began(tmp_path):
    folder = Path(rank_backends.__file__).parent
    with subprocess.Popen([sys.executable, "-c", ORPHAN, folder, tmp_path], stdout=subprocess.PIPE) as engine:
        rank = int(engine.stdout.readline())
    try:
        wait_for(lambda: not alive(rank))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
