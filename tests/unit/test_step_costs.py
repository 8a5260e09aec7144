"""Step times are measured once for all engines of a machine that share a profile, and nothing waits for ever."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from seer.common.policy.draft_budget import DraftBudget, choose_lengths
from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.graph_times import MOST_SIZES, Graphs
from seer.common.types import Capacity
from seer.services.engine.vllm.drafts import step_times as costs

PROFILE = StepCosts(batches=(1,), drafts=(0,), grid=((0.5,),))

_ENGINE = """
import sys, time
from pathlib import Path
from seer.common.policy.draft_costs import StepCosts
from seer.services.engine.vllm.drafts.step_times import kept

folder, name = Path(sys.argv[1]), sys.argv[2]

def measure():
    begun = folder / "begun"
    begun.write_text(begun.read_text() + name if begun.exists() else name)
    (folder / "measuring").mkdir()  # fails if another one does
    while not (folder / "go on").exists():
        time.sleep(0.01)
    (folder / "measuring").rmdir()
    return StepCosts(batches=(1,), drafts=(0,), grid=((float(name),),))

print("started", flush=True)
print(kept(folder / "cache" / sys.argv[3], measure).grid[0][0])
"""


def engine(folder: Path, name: str, profile: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _ENGINE, folder, name, profile], stdout=subprocess.PIPE, text=True
    )


def lock_file(path: Path) -> Path:
    (found,) = path.glob("measuring-*.lock")
    return found


@pytest.mark.parametrize(("profiles", "measured"), [(("a", "a", "a"), 1), (("a", "b", "c"), 3)])
def test_engines_that_start_together_measure_one_after_the_other_and_once_a_profile(
    tmp_path, profiles, measured
):
    engines = [engine(tmp_path, str(i), profile) for i, profile in enumerate(profiles, start=1)]
    try:
        for each in engines:
            assert each.stdout is not None
            assert each.stdout.readline() == "started\n"
        (tmp_path / "go on").touch()
        said = [each.communicate(timeout=60)[0] for each in engines]
    finally:
        for each in engines:
            each.kill()
    assert [each.returncode for each in engines] == [0, 0, 0]
    names = (tmp_path / "begun").read_text()
    assert len(names) == measured
    if measured == 1:  # all have the first one's
        assert [float(each) for each in said] == [float(names)] * 3


def test_a_killed_engine_holds_up_nobody(tmp_path):
    killed = engine(tmp_path, "1", "a")
    assert killed.stdout is not None
    killed.stdout.readline()
    while not (tmp_path / "measuring").exists():
        assert killed.poll() is None
    killed.kill()
    killed.wait()
    assert costs.kept(tmp_path / "cache" / "a", lambda: PROFILE) == PROFILE


def test_who_waits_for_too_long_measures_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(costs, "POLL_SECONDS", 0.0)
    costs.kept(tmp_path / "a", lambda: PROFILE)
    held = os.open(lock_file(tmp_path), os.O_WRONLY)  # a stopped engine has it
    fcntl.flock(held, fcntl.LOCK_EX)
    assert costs.kept(tmp_path / "b", lambda: PROFILE) == PROFILE
    assert msgspec.json.decode((tmp_path / "b").read_bytes(), type=StepCosts) == PROFILE
    os.close(held)


def test_a_profile_that_is_there_is_read_while_another_is_measured(tmp_path):
    costs.kept(tmp_path / "a", lambda: PROFILE)
    held = os.open(lock_file(tmp_path), os.O_WRONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert costs.kept(tmp_path / "a", pytest.fail) == PROFILE
    os.close(held)


def test_a_cache_that_cannot_be_written_costs_a_measurement(tmp_path):
    (tmp_path / "file").touch()
    assert costs.kept(tmp_path / "file" / "cache" / "a", lambda: PROFILE) == PROFILE
    assert costs.kept(Path("/proc/seer/a"), lambda: PROFILE) == PROFILE


def test_a_profile_that_cannot_be_read_is_measured_again(tmp_path):
    (tmp_path / "a").write_text("{")
    assert costs.kept(tmp_path / "a", lambda: PROFILE) == PROFILE
    assert costs.kept(tmp_path / "a", pytest.fail) == PROFILE


def capacity(kv_blocks: int, max_model_len: int) -> Capacity:
    return Capacity(
        kv_blocks=kv_blocks, block_size=32, max_num_seqs=8, max_model_len=max_model_len, draft_tokens=8
    )


def probe_of(kv_blocks: int, max_model_len: int) -> SimpleNamespace:
    return SimpleNamespace(core=SimpleNamespace(capacity=capacity(kv_blocks, max_model_len)))


@pytest.mark.parametrize(
    ("kv_blocks", "max_model_len", "contexts"),
    [(10_000, 5000, [1024, 4096]), (10_000, 2000, [1024]), (10_000, 1000, []), (200, 5000, [1024]), (100, 5000, [])],
)  # fmt: skip
def test_contexts_are_those_that_the_engine_holds(kv_blocks, max_model_len, contexts):
    assert costs._contexts(capacity(kv_blocks, max_model_len), 8, 200) == contexts
    assert costs._contexts(capacity(kv_blocks, max_model_len), 1, 200) == []


def test_what_attention_adds_is_found_from_longer_contexts(monkeypatch):
    batch, draft = 8, 4

    def line(probe, rows, drafts, length, context=0):
        each = [drafted / rows for drafted in drafts]
        return tuple(0.01 + 0.001 * count + rows * context * (1e-6 + 1e-7 * count) for count in each)

    monkeypatch.setattr(costs, "_line", line)
    found = costs._reading(probe_of(10_000, 5000), batch, draft, 200)
    assert found == pytest.approx((1e-6, 1e-7))
    assert costs._reading(probe_of(10_000, 1000), batch, draft, 200) == (0.0, 0.0)
    # Noise that says that longer contexts are faster counts as no difference.
    monkeypatch.setattr(costs, "_line", lambda *given: (0.009, 0.008) if given[4] else (0.01, 0.01))
    assert costs._reading(probe_of(10_000, 5000), batch, draft, 200) == (0.0, 0.0)


def test_long_prompts_share_two_prefixes_and_none_is_common_to_all():
    chunks = [costs._chunk(row, 50, 200, 1024).tokens for row in range(6)]
    assert {len(tokens) for tokens in chunks} == {1024 + costs.PROMPT}
    prefixes = [tuple(tokens[:1024]) for tokens in chunks]
    assert len(set(prefixes)) == 2
    assert prefixes[0][0] != prefixes[1][0]
    assert len({tuple(tokens[1024:]) for tokens in chunks}) == 6


class GraphEngine:
    """An engine whose steps take the time of the graph that they are padded to, and far more without one."""

    vocab_size = plain_tokens = 50
    capacity = Capacity(kv_blocks=500, block_size=32, max_num_seqs=16, max_model_len=300, draft_tokens=8)

    def __init__(self, graphs: Graphs, *, ahead: bool = False) -> None:
        self.graphs, self.clock, self.measured = graphs, 0.0, set()
        self.backend = self.core = self
        self.chunks, self.drafts, self.ahead = [], (0, 0), ahead

    def seconds(self, batch: int, drafted: int) -> float:
        tokens = batch + drafted
        if drafted == 8 * batch and tokens <= max(self.graphs.full, default=0):
            return 0.003
        padded = next((size for size in self.graphs.mixed if size >= tokens), None)
        return 0.004 + 5e-6 * padded if padded else 0.006 + 2e-6 * tokens

    def hold_drafts(self, count, longer=0):
        assert not (longer and self.ahead), "ahead, all draft as many"
        self.drafts = count, longer

    def add(self, chunk):
        self.chunks.append(chunk)

    def drop(self, request_id, attempt):
        self.chunks = [chunk for chunk in self.chunks if chunk.request_id != request_id]

    def step(self):
        count, longer = self.drafts
        drafted = sum(min(8, count + (chunk.index < longer)) for chunk in self.chunks)
        self.measured.add((len(self.chunks), drafted))
        self.clock += self.seconds(len(self.chunks), drafted)

    def profile(self, monkeypatch) -> StepCosts:
        monkeypatch.setattr(costs.time, "perf_counter", lambda: self.clock)
        return costs._measure(self, [1, 2, 4, 8, 16], 200, 8, False, self.graphs)

    def tokens_per_second(self, batch, keep, chances):
        gained = sum(chances[i, :kept].sum() for i, kept in enumerate(keep))
        return (batch + gained) / self.seconds(batch, int(keep.sum()))


SIZES = (9, 18, 27, 36, 54, 72, 90, 108)


@pytest.mark.parametrize("batch", [14, 15, 16])
def test_a_budget_stays_on_the_cheap_side_of_the_largest_graph(batch, monkeypatch):
    engine = GraphEngine(Graphs(mixed=SIZES))
    known = engine.profile(monkeypatch)
    smooth = msgspec.structs.replace(
        known, drafts=(0, 1, 2, 4, 8), graphs=None,
        grid=tuple(tuple(engine.seconds(b, b * each) for each in (0, 1, 2, 4, 8)) for b in known.batches),
    )  # fmt: skip
    chances = np.cumprod(np.full((batch, 8), 0.93), axis=1)
    keep, before = (
        choose_lengths(chances, DraftBudget(each, 8).seconds(batch, 8 * batch), 0.0)
        for each in (known, smooth)
    )
    assert batch + keep.sum() == SIZES[-1], "the largest graph is used to its last row"
    assert batch + before.sum() > SIZES[-1]
    gain = engine.tokens_per_second(batch, keep, chances) / engine.tokens_per_second(batch, before, chances)
    assert gain > 1.05


def test_all_drafts_are_verified_where_their_graph_is_the_cheapest(monkeypatch):
    engine = GraphEngine(Graphs(mixed=SIZES, full=SIZES))
    known = engine.profile(monkeypatch)
    chances = np.cumprod(np.full((8, 8), 0.4), axis=1)

    def kept(costs, batch):
        return choose_lengths(chances[:batch], DraftBudget(costs, 8).seconds(batch, 8 * batch), 0.0).tolist()

    assert kept(known, 8) == [8] * 8
    assert kept(known, 7) == [8] * 7, "also between batches that were measured"
    without = GraphEngine(Graphs(mixed=SIZES)).profile(monkeypatch)
    assert sum(kept(without, 8)) < 64
    # Beyond the largest graph for all drafts, the step with all has none.
    large = DraftBudget(known, 8).seconds(14, 14 * 8)
    assert large[-1] >= large[-2] > large[0]


def test_captured_sizes_are_measured_within_a_bound(monkeypatch):
    sizes = tuple(range(9, 109, 9))
    engine = GraphEngine(Graphs(mixed=sizes, full=sizes))
    engine.profile(monkeypatch)
    for batch in (4, 8, 16):
        found = {batch + drafted for size, drafted in engine.measured if size == batch}
        assert len(found) <= MOST_SIZES + 2, "and plain steps, and those with all drafts"
        assert {batch, 9 * batch} <= found
        assert engine.graphs.padded(batch) in found
    assert {108, 109} <= {16 + drafted for size, drafted in engine.measured if size == 16}


@pytest.mark.parametrize("engine", [GraphEngine(Graphs()), GraphEngine(Graphs(mixed=SIZES), ahead=True)])
def test_without_graphs_and_ahead_all_draft_as_many(engine, monkeypatch):
    known = engine.profile(monkeypatch)
    assert known.graphs is None
    assert (known.batches, known.drafts) == ((1, 2, 4, 8, 16), (0, 1, 2, 4, 8))
    assert engine.measured == {(b, b * each) for b in known.batches for each in known.drafts}
    for i, batch in enumerate(known.batches):
        assert known.grid[i] == pytest.approx([engine.seconds(batch, batch * each) for each in known.drafts])


def test_other_captured_sizes_have_another_profile(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = SimpleNamespace(model_config=SimpleNamespace(model=tmp_path), speculative_config=None)
    core = SimpleNamespace(vllm_config=config, versions={}, capacity=capacity(10_000, 5000))
    kinds = [Graphs(), Graphs(mixed=(9,)), Graphs(mixed=(9, 18)), Graphs(mixed=(9,), full=(9,))]
    assert len({costs._key(core, [1, 2], 8, False, each) for each in kinds}) == len(kinds)
    plain = costs._key(core, [1, 2], 8, False, Graphs())
    config.speculative_config = SimpleNamespace(
        use_ngram=lambda: False, draft_model_config=SimpleNamespace(model=tmp_path)
    )
    assert costs._key(core, [1, 2], 8, False, Graphs()) != plain, "with a head"


def test_a_profile_of_graphs_is_kept_as_it_was_measured(tmp_path, monkeypatch):
    known = GraphEngine(Graphs(mixed=SIZES, full=SIZES)).profile(monkeypatch)
    assert costs.kept(tmp_path / "a", lambda: known) == known
    assert costs.kept(tmp_path / "a", pytest.fail) == known
