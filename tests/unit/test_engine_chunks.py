"""A chunk's way through the engine: what orders say and what results tell."""

import msgspec
import numpy as np
import pytest

from seer.common import beside, wire
from seer.common.errors import InvalidField
from seer.common.policy.draft_costs import CELLS
from seer.common.types import SamplingParams
from seer.common.wire import codec
from seer.services.engine.backend import ChunkEnd
from seer.services.engine.chunks import chunk_of, done_message, start_chunk
from seer.services.engine.vllm.checks import token_budget


def order(**fields):
    return wire.RunChunk(
        request_id="r/p#1", group_id="r/p", attempt=7, key=5, prompt_len=2, max_new_tokens=4,
        sampling=SamplingParams(), tokens=np.arange(3, dtype=np.int32), **fields,
    )  # fmt: skip


@pytest.mark.parametrize(("percent", "rates"), [([], ()), ([50] * CELLS, (0.5,) * CELLS), ([50], ())])
def test_acceptance_reaches_the_backend_as_rates_or_not_at_all(percent, rates):
    sent = order(acceptance=percent, probe=True)
    chunk = chunk_of(sent, start_chunk(sent, 3), {}.get)
    assert (chunk.acceptance, chunk.probe, chunk.index, chunk.attempt) == (rates, True, 1, 3)


@pytest.mark.parametrize(("turn_start", "counts_from"), [(0, 2), (2, 2), (3, 3)])
def test_a_turn_counts_from_where_it_begins_or_from_the_prompts_end(turn_start, counts_from):
    sent = order(turn_start=turn_start, parks=True)
    run = start_chunk(sent, 3)
    chunk = chunk_of(sent, run, {}.get)
    assert (chunk.turn_start, chunk.counts_from) == (turn_start, counts_from)
    assert chunk.parks
    assert run.parks
    assert run.length == 1, "in the dgds and in trees a response's positions count from the prompt"
    assert token_budget(msgspec.structs.replace(chunk, max_new_tokens=10**9)) == 512 - 3 + counts_from


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"prompt_len": 0}, "prompt_len"), ({"prompt_len": 4}, "prompt_len"), ({"turn_start": -1}, "turn_start"),
     ({"turn_start": 1}, "turn_start"), ({"turn_start": 4}, "turn_start")],
)  # fmt: skip
def test_positions_outside_the_tokens_are_refused_by_name(changes, field):
    sent = order()
    chunk = msgspec.structs.replace(chunk_of(sent, start_chunk(sent, 3), {}.get), **changes)
    with pytest.raises(InvalidField, match=f"{field} = .* to the 3 tokens given") as caught:
        chunk.check_positions()
    assert caught.value.field == field


def test_counts_of_drafts_leave_with_the_result():
    run = start_chunk(order(), 3)
    run.tokens, run.logprobs = [8, 9], [-0.5, -1.0]
    end = ChunkEnd(request_id="r/p#1", attempt=3, finish="stop", drafted=[5, 2], accepted=[4, 0])
    (result,) = done_message([(end, run)], 0, {}).results
    assert (result.attempt, result.count, result.drafted, result.accepted) == (7, 2, [5, 2], [4, 0])


def test_large_results_of_one_flush_leave_in_messages_that_the_buffer_reads(monkeypatch):
    monkeypatch.setattr(codec, "SPLIT_BYTES", 2**18)  # so 16 MiB are 64 frames, as 2 GiB really are
    ended, streaming, reader = [], {}, codec.Decoder(wire.EngineToBuffer)
    for index in range(12):
        run = start_chunk(order(), 3)
        run.tokens, run.logprobs = [index], [-0.5]
        run.extras = {beside.TOP_LOGPROBS: [np.full((1, 2**19), index, np.float32)]}  # 2 MiB
        if index < 9:
            routes = np.full((1, 2**20, 1), index, np.uint8)
            end = ChunkEnd(request_id=str(index), attempt=3, finish="stop", routes=routes)
            ended.append((end, run))
        else:
            streaming[str(index)] = run
    found = []
    while ended or streaming:
        done = reader.decode(codec.encode(done_message(ended, 0, streaming)))
        parts = [*done.results, *done.going_on]
        sizes = [part.beside for part in parts]
        for part, token, extra in zip(parts, done.tokens, beside.split(done.beside, sizes), strict=True):
            logprobs, routes = (
                beside.array_of(word, extra) for word in (beside.TOP_LOGPROBS, beside.ROUTED_EXPERTS)
            )
            found.append((part.request_id, token, logprobs.max(), None if routes is None else routes.max()))
    assert found == [(str(index), index, index, index if index < 9 else None) for index in range(12)]


def test_texts_of_one_flush_leave_in_messages_that_the_buffer_reads():
    ended, reader = [], codec.Decoder(wire.EngineToBuffer)
    for index in range(300):
        end = ChunkEnd(request_id=str(index), attempt=3, finish="stop", stop_reason="\U0001f600" * 2**14)
        ended.append((end, start_chunk(order(), 3)))
    found = []
    while ended:
        done = reader.decode(codec.encode(done_message(ended, 0, {})))
        found += [result.request_id for result in done.results]
    assert found == [str(index) for index in range(300)]


def test_results_that_wait_for_a_later_message_are_not_measured_for_each():
    class Extras(dict):
        looks = 0

        def values(self):
            self.looks += 1
            return super().values()

    ended, all_extras = [], []
    for index in range(8):
        run = start_chunk(order(), 3)
        run.extras = Extras({beside.TOP_LOGPROBS: [np.zeros((1, 2**21), np.float32)]})  # 8 MiB
        all_extras.append(run.extras)
        ended.append((ChunkEnd(request_id=str(index), attempt=3, finish="stop"), run))
    while ended:
        done_message(ended, 0, {})
    assert max(extras.looks for extras in all_extras) <= 2
