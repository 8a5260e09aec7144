"""The parts of the KV pool's store: breaker, thread, staging memory, and what engines share by."""

import queue
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")

from living import wait_for  # noqa: E402 - after torch, which may be missing

from seer.services.engine.vllm.kv_pool import sharing as sharing_module  # noqa: E402
from seer.services.engine.vllm.kv_pool import unreachable_store  # noqa: E402
from seer.services.engine.vllm.kv_pool.block_copies import CHECKSUM_BYTES, KvRegions  # noqa: E402
from seer.services.engine.vllm.kv_pool.checksummed_buffer import StagingBuffer  # noqa: E402
from seer.services.engine.vllm.kv_pool.sharing import KvSharing, tokens_to_save  # noqa: E402
from seer.services.engine.vllm.kv_pool.unreachable_store import (  # noqa: E402
    FIRST_SECONDS,
    LONGEST_SECONDS,
    CallThread,
    CircuitBreaker,
)
from seer.services.engine.vllm.requests import ExtraArgs  # noqa: E402

pytestmark = pytest.mark.vllm


# --- breaker


@given(st.lists(st.tuples(st.sampled_from(["failed", "worked"]), st.floats(0, 20, allow_nan=False))))
def test_nothing_is_tried_in_a_pause_and_a_success_ends_it(events):
    breaker, now, until_, pause = CircuitBreaker(), 1.0, 0.0, FIRST_SECONDS
    for event, later in events:
        now += later
        if event == "worked":
            breaker.succeeded()
            until_, pause = 0.0, FIRST_SECONDS
        else:
            breaker.failed(now)
            if now >= until_:  # one of several that failed together lengthens it no further
                until_, pause = now + pause, min(2 * pause, LONGEST_SECONDS)
        assert (breaker.allows(now), breaker.until) == (now >= until_, until_)


# --- thread


def test_a_lane_keeps_order_and_passes_on_answers_and_errors():
    thread, order = CallThread("t"), []
    futures = [thread.submit(lambda i=i: order.append(i) or 10 // i) for i in (5, 0, 2)]
    assert (futures[0].result(10), futures[2].result(10)) == (2, 5)
    with pytest.raises(ZeroDivisionError):
        futures[1].result(10)
    assert order == [5, 0, 2]


def test_a_full_lane_refuses_and_says_since_when_it_is_busy(monkeypatch):
    monkeypatch.setattr(unreachable_store, "MAX_WAITING", 2)
    thread, begun, gate = CallThread("t"), threading.Event(), threading.Event()
    assert thread.busy_since == float("inf")
    thread.submit(lambda: begun.set() or gate.wait(30))
    assert begun.wait(30)
    first = thread.busy_since
    assert first < float("inf")
    waiting = [thread.submit(lambda: None) for _ in range(2)]
    with pytest.raises(queue.Full):
        thread.submit(lambda: None)
    assert thread.busy_since == first
    gate.set()
    assert [future.result(30) for future in waiting] == [None, None]
    wait_for(lambda: thread.busy_since == float("inf"))


# --- staging memory

NO_KV = KvRegions([(0, torch.zeros((1, 10), dtype=torch.uint8))])


def test_a_row_enters_only_with_its_own_key_and_bytes():
    memory = torch.arange(60, dtype=torch.uint8).reshape(6, 10)
    staging = StagingBuffer(4, 10, KvRegions([(500, memory)]))
    slots = staging.acquire(2, leave=0, seconds=1)
    staging.copy_in(slots, ["a", "b"], [[500], [510]])
    assert staging.copy_out(slots, ["a", "b"], [[540], [550]]) == [True, True]
    assert memory[4:].tolist() == memory[:2].tolist()
    before = memory.clone()
    assert staging.copy_out(slots, ["b", "a"], [[520], [530]]) == [False, False]
    for at in range(CHECKSUM_BYTES + 10):
        staging._bytes[slots[0], at] ^= 1
        assert staging.copy_out(slots[:1], ["a"], [[520]]) == [False]
        staging._bytes[slots[0], at] ^= 1
    assert torch.equal(memory, before)
    assert staging.copy_out(slots[:1], ["a"], [[520]]) == [True]


def test_slots_belong_to_one_taker_and_what_they_held_is_worth_nothing():
    memory = torch.zeros((2, 10), dtype=torch.uint8)
    staging = StagingBuffer(4, 10, KvRegions([(0, memory)]))
    mine = staging.acquire(3, leave=1, seconds=1)
    assert len({*mine, *staging.acquire(1, leave=0, seconds=1)}) == 4
    assert staging.acquire(1, leave=0, seconds=0.01) == []
    staging.copy_in(mine, ["a", "a", "a"], [[0]] * 3)
    staging.release(mine)
    assert staging.acquire(3, leave=1, seconds=0.01) == []  # the fourth is taken still
    assert staging.acquire(3, leave=0, seconds=1) == mine
    assert staging.copy_out(mine, ["a", "a", "a"], [[10]] * 3) == [False] * 3


def test_whoever_waits_for_slots_has_them_once_they_are_free():
    staging, got = StagingBuffer(4, 10, NO_KV), []
    mine = staging.acquire(4, leave=0, seconds=1)
    waiting = threading.Thread(target=lambda: got.extend(staging.acquire(4, leave=0, seconds=30)))
    waiting.start()
    for slot in mine:
        assert got == []
        staging.release([slot])
    waiting.join(30)
    assert sorted(got) == sorted(mine)


def test_rows_lie_one_after_the_other_in_one_piece():
    staging = StagingBuffer(3, 10, NO_KV)
    first, second, third = staging.addresses([0, 1, 2])
    assert (first, second - first, third - second) == (staging.address, staging.row_bytes, staging.row_bytes)
    assert staging.size == 3 * staging.row_bytes


# --- sharing


class Ranks:
    """Two ranks that note what is asked of them."""

    def __init__(self, layouts=("flash NHD cuda", "flash NHD cuda")):
        self.layouts, self.asked = layouts, []
        self.counts = [{"saved_blocks": 2, "away": 1}, {"saved_blocks": 3, "away": 1, "failures": 4}]

    def __call__(self, method, **arguments):
        self.asked.append((method, arguments))
        match method:
            case "seer_kv_layout":
                return [[layout] for layout in self.layouts]
            case "seer_pool_counts":
                return self.counts
        return [None, None]

    def given(self, method):
        return [arguments for name, arguments in self.asked if name == method]


def vllm_config(dtype="bfloat16", kv="auto", block=32, tp=2, pp=1, algo="sha256", head=None):
    drafts = SimpleNamespace(
        use_ngram=lambda: head is None, draft_model_config=SimpleNamespace(model=str(head))
    )
    return SimpleNamespace(
        speculative_config=drafts,
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(cache_dtype=kv, block_size=block, prefix_caching_hash_algo=algo),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp),
    )


def sharing_of(folder, ranks=None, config="{}", **facts):
    ranks = ranks or Ranks()
    (folder / "config.json").write_text(config)
    return KvSharing(ranks, folder, vllm_config(**facts)), ranks


def namespace_of(folder, digest="w", **how):
    sharing, ranks = sharing_of(folder, **how)
    sharing.bind(digest)
    ((name,),) = (use.values() for use in ranks.given("seer_use_pool_namespace"))
    return name


@pytest.mark.parametrize(
    "other",
    [
        {"digest": "v"},
        {"config": '{"rope_theta": 1}'},
        {"dtype": "float32"},
        {"kv": "fp8"},
        {"block": 16},
        {"tp": 4},
        {"pp": 2},
        {"algo": "xxhash"},
        {"ranks": Ranks(("torch NHD cuda", "torch NHD cuda"))},
    ],
    ids=lambda other: next(iter(other)),
)
def test_engines_that_differ_in_anything_share_nothing(tmp_path, other):
    assert namespace_of(tmp_path, **other) != namespace_of(tmp_path)


def test_engines_with_batch_invariant_kernels_and_without_share_nothing(tmp_path, monkeypatch):
    without = namespace_of(tmp_path)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert namespace_of(tmp_path) != without


def test_engines_of_another_python_share_nothing(tmp_path, monkeypatch):
    here = namespace_of(tmp_path)
    monkeypatch.setattr(sharing_module.platform, "python_version_tuple", lambda: ("3", "99", "0"))
    assert namespace_of(tmp_path) != here


def test_equal_engines_share_under_a_name_of_ours_and_unknown_weights_are_not_shared(tmp_path):
    name = namespace_of(tmp_path)
    assert name.startswith("seer-")
    assert name == namespace_of(tmp_path)
    assert namespace_of(tmp_path, digest="") == ""


def request(*digests):
    return SimpleNamespace(block_hashes=[bytes([digest]) for digest in digests])


def test_what_a_response_alone_saved_is_removed_and_what_its_prompt_has_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing_module, "FORGET_BLOCKS", 3)
    sharing, ranks = sharing_of(tmp_path)
    sharing.bind("w")
    sharing.finished(request(1, 2, 3, 9), prompt_blocks=1, saved_blocks=3)
    assert ranks.given("seer_remove_from_pool") == []
    sharing.finished(request(1, 4), prompt_blocks=1, saved_blocks=3)
    assert ranks.given("seer_remove_from_pool") == [{"hashes": ["02", "03", "04"]}]
    sharing.flush()
    sharing.finished(request(1, 5), prompt_blocks=1, saved_blocks=0)
    sharing.flush()
    assert len(ranks.given("seer_remove_from_pool")) == 1


def test_what_was_shared_before_is_not_removed_from_under_a_new_name(tmp_path):
    sharing, ranks = sharing_of(tmp_path)
    sharing.bind("w")
    sharing.finished(request(1, 2), prompt_blocks=0, saved_blocks=2)
    sharing.bind("v")
    sharing.flush()
    assert ranks.given("seer_remove_from_pool") == []


def test_ranks_counters_are_added_up_and_not_asked_for_at_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing_module, "COUNT_SECONDS", 3600.0)
    monkeypatch.setattr(sharing_module, "time", SimpleNamespace(monotonic=lambda: 4000.0))
    sharing, ranks = sharing_of(tmp_path)
    expected = {"saved_blocks": 5, "away": 2, "failures": 4}
    assert (sharing.counts(), sharing.counts()) == (expected, expected)
    assert len(ranks.given("seer_pool_counts")) == 1


def test_engines_with_other_heads_share_nothing(tmp_path):
    heads = [tmp_path / name for name in ("one", "other", "equal")]
    for number, head in enumerate(heads):
        head.mkdir()
        header = b'{"fc":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        data = len(header).to_bytes(8, "little") + header + bytes([number % 2])
        (head / "model.safetensors").write_bytes(data)
        (head / "config.json").write_text("{}")
    one, other, equal, mtp, none = (namespace_of(tmp_path, head=head) for head in (*heads, tmp_path, None))
    assert one == equal
    assert len({one, other, mtp, none}) == 4
    (heads[2] / "config.json").write_text('{"rms_norm_eps": 1}')
    assert namespace_of(tmp_path, head=heads[2]) != one


@pytest.mark.parametrize(
    ("ended", "continues", "parks", "saved"),
    [("limit", True, False, 96), ("limit", False, False, 0), ("limit", True, True, 96),
     ("stop", True, False, 0), ("stop", True, True, 96), ("abort", True, True, 0)],
)  # fmt: skip
def test_kv_is_saved_where_the_response_goes_on_or_may_in_another_turn(ended, continues, parks, saved):
    extra = ExtraArgs(
        sampling=None, group="", index=0, prompt_len=3, limit=99, continues=continues, parks=parks
    )
    how = {"at_limit": ended == "limit", "at_stop": ended == "stop"}
    assert tokens_to_save(extra, **how, computed=127, known=128, block_size=32) == saved


@pytest.mark.parametrize(
    ("computed", "known", "saved"),
    [(127, 128, 96), (128, 128, 128), (128, 127, 96), (133, 129, 128), (31, 32, 0)],
)
def test_kv_of_drafts_that_follow_a_stop_is_not_saved(computed, known, saved):
    extra = ExtraArgs(sampling=None, group="", index=0, prompt_len=3, limit=99, continues=True, parks=True)
    how = {"at_limit": False, "at_stop": True}
    assert tokens_to_save(extra, **how, computed=computed, known=known, block_size=32) == saved
