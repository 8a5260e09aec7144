"""Receipts: all that a response is a function of, the response itself, and where its chunks ran.

Invariants (tests/unit/test_receipt.py):
- a receipt and its weights are enough to generate the response again (`seer recompute`), images apart;
- `problems` names every part that was changed after the chain was computed. Nothing is signed: who computes
  the chain again is found by generating again, if tokens, logprobs or the end are not what the rest gives;
- of a response's chunks nothing is left out: their tokens add up to the response's.

The chain has one digest for each part of the receipt, in the order of `_parts`: of the digest before it and
of the part. The last one stands for the whole receipt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import structs

from seer.common import ids
from seer.common.errors import NOT_DECODED
from seer.common.types import MAX_TOKEN_ID, FinishReason, Placed, SamplingParams

WORD = "receipt"
"""What the buffer's records are called beside a response's tokens (`common/beside.py`): lines of JSON."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class ChunkRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chunk: `count` tokens that `engine`, of these versions, generated with weights of this version.

    Of `drafted` tokens `accepted` were. `log`: file and offset in the buffer's log where the chunk's end is,
    or its first tokens if it was streamed; empty: the log is in no file. In the buffer's records an empty
    `engine` goes on with the chunk of the record before.
    """

    engine: str = ""
    weight_version: int = 0
    versions: dict[str, str] = {}
    count: _Count = 0
    drafted: _Count = 0
    accepted: _Count = 0
    log: str = ""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's docstring.

    `prompt_token_ids` are all tokens before the response, of a later turn the whole context; `images` stand
    in them. `weights_digest` is what engines check (`common/weights/digest.py`). The noise `key`, of 16
    hexadecimal digits, is that of response `index` of `group`.
    """

    weights_digest: str
    prompt_token_ids: list[_Count]
    images: list[Placed] = []
    sampling: SamplingParams
    seed: _Int64
    rollout_number: _Int64
    group: str
    index: _Count
    key: str
    chunks: list[ChunkRecord]
    token_ids: list[_Count]
    logprobs: list[float]
    finish_reason: FinishReason
    stop_reason: str
    chain: list[_Digest] = []

    @property
    def digest(self) -> str:
        """The last digest of the chain, which stands for the whole receipt."""
        return self.chain[-1]


def key_of(seed: int, rollout_number: int, group: str, index: int) -> str:
    """Return a noise key as receipts have it."""
    return f"{ids.request_key(seed, rollout_number, group, index):016x}"


def sealed(receipt: Receipt) -> Receipt:
    """Return a receipt with its chain."""
    chain = [""]
    for _, part in _parts(receipt):
        chain.append(_link(chain[-1], part))
    return structs.replace(receipt, chain=chain[1:])


def problems(receipt: Receipt) -> list[str]:
    """Return the names of the parts that are not those of which the chain was computed, or disagree."""
    parts = list(_parts(receipt))
    found = [
        name
        for (name, part), before, link in zip(parts, ["", *receipt.chain], receipt.chain, strict=False)
        if link != _link(before, part)
    ]
    if len(receipt.chain) != len(parts):
        found.append("chain")
    made = sum(chunk.count for chunk in receipt.chunks)
    if receipt.key != key_of(receipt.seed, receipt.rollout_number, receipt.group, receipt.index):
        found.append("key")
    if not 0 < made == len(receipt.token_ids) == len(receipt.logprobs):
        found.append("token counts")
    return list(dict.fromkeys(found))


def _parts(receipt: Receipt) -> Iterator[tuple[str, object]]:
    """Yield name and content of every part, in the order of the chain."""
    yield "weights_digest", receipt.weights_digest
    yield "prompt_token_ids", receipt.prompt_token_ids
    yield "images", receipt.images
    yield "sampling", ids.sortable(receipt.sampling)
    for name in ("seed", "rollout_number", "group", "index", "key"):
        yield name, getattr(receipt, name)
    start = 0
    for number, chunk in enumerate(receipt.chunks):
        end = start + chunk.count
        yield f"chunks[{number}]", chunk
        yield f"token_ids[{start}:{end}]", receipt.token_ids[start:end]
        yield f"logprobs[{start}:{end}]", receipt.logprobs[start:end]
        start = end
    yield "finish_reason", receipt.finish_reason
    yield "stop_reason", receipt.stop_reason


def _link(before: str, part: object) -> str:
    text = msgspec.msgpack.encode((before, part), order="sorted")
    return hashlib.blake2b(text, digest_size=16, person=b"seer-receipt-v1").hexdigest()


# --- the buffer's records --------------------------------------------------------------------------

_records = msgspec.json.Decoder(ChunkRecord)


def line(record: ChunkRecord) -> bytes:
    """Return a record as it is kept beside the tokens."""
    return msgspec.json.encode(record) + b"\n"


def chunks(lines: bytes, tokens: int) -> list[ChunkRecord]:
    """Return a response's chunks. Raises `ValueError` unless they have so many tokens."""
    found: list[ChunkRecord] = []
    try:
        for record in map(_records.decode, lines.splitlines()):
            if record.engine:
                found.append(record)
            else:
                found[-1] = _together(found[-1], record)
    except (*NOT_DECODED, IndexError) as error:
        raise ValueError(f"no records of chunks: {error}") from error
    if sum(record.count for record in found) != tokens:
        raise ValueError(f"the records of chunks do not have {tokens} tokens")
    return found


def _together(chunk: ChunkRecord, record: ChunkRecord) -> ChunkRecord:
    names = "count", "drafted", "accepted"
    return structs.replace(chunk, **{name: getattr(chunk, name) + getattr(record, name) for name in names})
