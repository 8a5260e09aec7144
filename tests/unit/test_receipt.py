"""Receipts: every edit is named, and a chain that was computed again hides an edit from the chain alone."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from seer.common import receipt
from seer.common.receipt import ChunkRecord, Receipt, problems, sealed
from seer.common.types import Placed, SamplingParams

COUNTS = (3, 2)


def made() -> Receipt:
    return sealed(
        Receipt(
            weights_digest="ab" * 16, prompt_token_ids=[5, 6, 7], images=[Placed("0" * 64, 0, 1)],
            sampling=SamplingParams(max_tokens=9, top_p=0.5, logit_bias={3: 1.5}, receipt=True), seed=-4,
            rollout_number=7, group="p1", index=2, key=receipt.key_of(-4, 7, "p1", 2),
            chunks=[
                ChunkRecord(
                    engine=f"e{place}", weight_version=1, versions={"torch": "2"}, count=count, drafted=4, accepted=1,
                    log="a.jsonl:12",
                )
                for place, count in enumerate(COUNTS)
            ],
            token_ids=[1, 2, 3, 4, 5], logprobs=[-0.5, -1.25, -0.0, -2.0, -3.5], finish_reason="stop",
            stop_reason="5",
        )
    )  # fmt: skip


WHOLE = made()


def chunk(place: int, **fields: object) -> list[ChunkRecord]:
    chunks = list(WHOLE.chunks)
    chunks[place] = structs.replace(chunks[place], **fields)
    return chunks


def sampling(**fields: object) -> SamplingParams:
    return structs.replace(WHOLE.sampling, **fields)


EDITS: dict[str, tuple[str, dict[str, object]]] = {
    "weights": ("weights_digest", {"weights_digest": "cd" * 16}),
    "prompt": ("prompt_token_ids", {"prompt_token_ids": [5, 6, 8]}),
    "shorter prompt": ("prompt_token_ids", {"prompt_token_ids": [5, 6]}),
    "image": ("images", {"images": [Placed("1" * 64, 0, 1)]}),
    "temperature": ("sampling", {"sampling": sampling(temperature=0.9)}),
    "bias": ("sampling", {"sampling": sampling(logit_bias={3: 1.25})}),
    "stop": ("sampling", {"sampling": sampling(stop=("x",))}),
    "seed": ("seed", {"seed": -3}),
    "rollout number": ("rollout_number", {"rollout_number": 8}),
    "group": ("group", {"group": "p2"}),
    "index": ("index", {"index": 3}),
    "key": ("key", {"key": "0" * 16}),
    "engine": ("chunks[0]", {"chunks": chunk(0, engine="e9")}),
    "version": ("chunks[1]", {"chunks": chunk(1, weight_version=2)}),
    "versions": ("chunks[1]", {"chunks": chunk(1, versions={"torch": "3"})}),
    "drafts": ("chunks[0]", {"chunks": chunk(0, drafted=5)}),
    "accepted": ("chunks[0]", {"chunks": chunk(0, accepted=0)}),
    "log": ("chunks[0]", {"chunks": chunk(0, log="a.jsonl:13")}),
    "count": ("token counts", {"chunks": chunk(1, count=1)}),
    "token": ("token_ids[0:3]", {"token_ids": [1, 9, 3, 4, 5]}),
    "last token": ("token_ids[3:5]", {"token_ids": [1, 2, 3, 4, 6]}),
    "token left out": ("token counts", {"token_ids": [1, 2, 3, 4]}),
    "logprob": ("logprobs[3:5]", {"logprobs": [-0.5, -1.25, -0.0, -2.0, -3.0]}),
    "finish": ("finish_reason", {"finish_reason": "length"}),
    "stop reason": ("stop_reason", {"stop_reason": "6"}),
    "chain cut": ("chain", {"chain": WHOLE.chain[:-1]}),
    "link": ("seed", {"chain": [*WHOLE.chain[:4], "0" * 32, *WHOLE.chain[5:]]}),
}


def test_a_receipt_has_no_problem_also_once_it_was_written():
    assert problems(WHOLE) == []
    assert msgspec.json.decode(msgspec.json.encode(WHOLE), type=Receipt) == WHOLE
    assert WHOLE.digest == WHOLE.chain[-1]
    assert len(set(WHOLE.chain)) == len(WHOLE.chain)


@pytest.mark.parametrize("edit", EDITS)
def test_every_edit_is_named(edit):
    name, fields = EDITS[edit]
    assert name in problems(structs.replace(WHOLE, **fields))


def test_the_edits_leave_no_field_out():
    assert {name for _, fields in EDITS.values() for name in fields} == set(Receipt.__struct_fields__)
    edited = {
        name for _, fields in EDITS.values() for each in fields.get("chunks", []) for name in _other(each)
    }
    assert edited == set(ChunkRecord.__struct_fields__)


def _other(chunk: ChunkRecord) -> list[str]:
    nearest = min(WHOLE.chunks, key=lambda its: len(_between(its, chunk)))
    return _between(nearest, chunk)


def _between(one: ChunkRecord, other: ChunkRecord) -> list[str]:
    return [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)]


@pytest.mark.parametrize("edit", EDITS)
def test_who_computes_the_chain_again_hides_an_edit_from_the_chain_but_not_what_must_agree(edit):
    left = problems(sealed(structs.replace(WHOLE, **EDITS[edit][1])))
    disagree = {"seed": "key", "rollout number": "key", "group": "key", "index": "key", "key": "key"}
    disagree |= {"count": "token counts", "token left out": "token counts"}
    assert left == ([disagree[edit]] if edit in disagree else [])


@given(st.data())
def test_one_changed_token_is_named_by_its_chunk(data):
    at = data.draw(st.integers(0, 4))
    tokens = list(WHOLE.token_ids)
    tokens[at] = data.draw(st.integers(0, 2**31 - 1).filter(lambda token: token != tokens[at]))
    expected = "token_ids[0:3]" if at < 3 else "token_ids[3:5]"
    assert problems(structs.replace(WHOLE, token_ids=tokens)) == [expected]


RECORD = ChunkRecord(engine="a\nb", weight_version=3, versions={"é": "\n"}, count=2, log="x:1")


def test_records_of_a_streamed_chunk_are_one_chunk():
    records = [
        RECORD, ChunkRecord(count=1), ChunkRecord(count=4, drafted=3, accepted=2),
        ChunkRecord(engine="c", count=1),
    ]  # fmt: skip
    found = receipt.chunks(b"".join(map(receipt.line, records)), 8)
    assert found == [structs.replace(RECORD, count=7, drafted=3, accepted=2), records[-1]]


@pytest.mark.parametrize(
    "lines",
    [
        b"", b"{", b"[]\n", receipt.line(ChunkRecord(count=2)), receipt.line(RECORD) + b"\xff\n",
        receipt.line(structs.replace(RECORD, count=3)),
    ],
)  # fmt: skip
def test_records_that_cannot_be_read_or_have_other_tokens_are_refused(lines):
    with pytest.raises(ValueError, match=r"records? of chunks"):
        receipt.chunks(lines, 2)
