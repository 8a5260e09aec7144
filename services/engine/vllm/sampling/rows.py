"""What the sampler is told about each row of logits: its request's parameters, key and position.

A request is packed once, when it arrives; a batch's table is built when requests come or go; each step
fills in positions and token histories.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from seer.common.errors import InvalidField
from seer.common.types import GREEDY_BELOW, SamplingParams

RECORD = np.dtype(
    [
        ("key", "<u8"),
        ("position", "<i8"),
        ("top_p", "<f8"),
        ("temperature", "<f4"),
        ("repetition", "<f4"),
        ("frequency", "<f4"),
        ("presence", "<f4"),
        ("log_min_p", "<f4"),
        ("top_k", "<i4"),
        ("prompt_len", "<i4"),
        ("min_tokens", "<i4"),
        ("slot", "<i4"),
        ("logprobs", "<i4"),
        ("stop_start", "<i4"),
        ("stop_len", "<i4"),
        ("bias_start", "<i4"),
        ("bias_len", "<i4"),
        ("extra_start", "<i4"),
        ("extra_len", "<i4"),
    ]
)
"""One row's parameters; `Record` in native/sampler/sampler.hpp is the same 88 bytes."""

LOGPROB_MODES = ("scaled", "raw", "processed")

_RECORD_WORDS = RECORD.itemsize // 8  # structured arrays copy field by field: words are 10 times faster
_EMPTY_INT = np.empty(0, np.int32)
_EMPTY_FLOAT = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """How one request is sampled; see `pack`."""

    record: bytes
    stop_ids: tuple[int, ...]
    bias: tuple[tuple[int, float], ...]

    @classmethod
    def pack(
        cls, sampling: SamplingParams, *, key: int, prompt_len: int, stop_ids: Sequence[int], vocab: int
    ) -> RequestSampling:
        """Pack a request's parameters.

        `key` is its 64-bit noise key (`seer.common.ids.request_key`), `prompt_len` the length of the
        original prompt, or of all before the current turn, and `stop_ids` every token id
        that ends it: these are masked until `min_tokens` are generated. Raises `InvalidField` for a value
        that `SamplingParams.check` refuses or a bias on a token outside the vocabulary.
        """
        sampling.check()
        for token in sampling.logit_bias:
            if token >= vocab:
                raise InvalidField("sampling.logit_bias", token, f"the vocabulary has {vocab} tokens")
        record = np.zeros((), RECORD)
        record["key"] = key
        record["top_p"] = sampling.top_p
        record["temperature"] = sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0
        record["repetition"] = sampling.repetition_penalty
        record["frequency"] = sampling.frequency_penalty
        record["presence"] = sampling.presence_penalty
        record["log_min_p"] = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
        record["top_k"] = sampling.top_k
        record["prompt_len"] = prompt_len
        record["min_tokens"] = sampling.min_tokens
        record["logprobs"] = LOGPROB_MODES.index(sampling.logprobs)
        masked = tuple(stop_ids) if sampling.min_tokens > 0 else ()
        return cls(record.tobytes(), masked, tuple(sampling.logit_bias.items()))


@dataclass(frozen=True, eq=False)
class RowParams:
    """The parameters of a batch of rows, all on the host.

    `records` is RECORD [rows]; its ragged fields index the flat arrays. A row's token history is
    `history[slot, :position - extra_len]` followed by `extra[extra_start:][:extra_len]`; it is
    read for rows with penalties only. Token ids outside the vocabulary are ignored.
    """

    records: npt.NDArray[np.void]
    stop_ids: npt.NDArray[np.int32]
    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]
    history: npt.NDArray[np.int32] | None = None
    extra: npt.NDArray[np.int32] = field(default_factory=lambda: _EMPTY_INT)

    @functools.cached_property
    def penalised(self) -> npt.NDArray[np.bool_]:
        """Which rows have penalties: bool [rows]."""
        r = self.records
        flags: npt.NDArray[np.bool_] = (r["repetition"] != 1) | (r["frequency"] != 0) | (r["presence"] != 0)
        return flags

    @property
    def truncated(self) -> bool:
        """Whether any row has min-p, top-k or top-p."""
        r = self.records
        return bool(((r["log_min_p"] > -1e30) | (r["top_k"] > 0) | (r["top_p"] < 1)).any())

    def part(self, start: int, stop: int) -> RowParams:
        """Return rows [start, stop)."""
        return replace(self, records=self.records[start:stop])

    def history_of(self, row: int) -> npt.NDArray[np.int32]:
        """Return a row's token history, int32 [position]; raises `ValueError` when it is not there."""
        record = self.records[row]
        known = int(record["position"] - record["extra_len"])
        slot, start, stop = (int(record[k]) for k in ("slot", "extra_start", "extra_len"))
        stop += start
        history = self.history
        if history is None or not (0 <= slot < len(history) and 0 <= known <= history.shape[1]):
            raise ValueError(f"row {row}: penalties need {known} tokens of history in slot {slot}")
        if not 0 <= start <= stop <= len(self.extra):
            raise ValueError(f"row {row}: extra tokens [{start}, {stop}) of {len(self.extra)}")
        return np.concatenate([history[slot, :known], self.extra[start:stop]])


class SamplingTable:
    """What does not change between the steps of a batch; rebuild it when requests come or go."""

    def __init__(self, requests: Sequence[RequestSampling], slots: Sequence[int] | None = None) -> None:
        """Take the requests in row order; `slots` are their rows of the history, 0, 1, ... by default."""
        packed = b"".join(r.record for r in requests)
        self._words = np.frombuffer(packed, np.int64).reshape(-1, _RECORD_WORDS).copy()
        self._records = self._words.view(RECORD)[:, 0]
        self._records["slot"] = range(len(requests)) if slots is None else slots
        self._stop_ids, self._bias_ids, self._bias_values = _EMPTY_INT, _EMPTY_INT, _EMPTY_FLOAT
        if any(r.stop_ids for r in requests):
            self._ragged("stop", [len(r.stop_ids) for r in requests])
            self._stop_ids = np.array([t for r in requests for t in r.stop_ids], np.int32)
        if any(r.bias for r in requests):
            self._ragged("bias", [len(r.bias) for r in requests])
            self._bias_ids = np.array([t for r in requests for t, _ in r.bias], np.int32)
            self._bias_values = np.array([b for r in requests for _, b in r.bias], np.float32)

    def _ragged(self, name: str, lengths: list[int]) -> None:
        self._records[f"{name}_len"] = lengths
        self._records[f"{name}_start"] = np.cumsum(lengths) - lengths

    def step(
        self,
        positions: npt.ArrayLike,
        history: npt.NDArray[np.int32] | None = None,
        drafts: Sequence[int] | npt.NDArray[np.integer] | None = None,
        draft_tokens: npt.NDArray[np.int32] | None = None,
    ) -> RowParams:
        """Return the rows of one step.

        `positions` [requests]: tokens known of each request (original prompt and output), which
        is the position of the first token to sample. `history` int32 [slots, length] holds them.
        `drafts` [requests] counts each request's drafts: it gets that many rows and one, row j
        after its first j drafts; the order is request by request. `draft_tokens` int32
        [sum(drafts)] are needed where rows have penalties.
        """
        if drafts is None:
            records = self._words.copy().view(RECORD)[:, 0]
            records["position"] = positions
            return RowParams(records, self._stop_ids, self._bias_ids, self._bias_values, history)
        counts = np.asarray(drafts, np.int64)
        request = np.repeat(np.arange(len(counts)), counts + 1)
        ends = np.cumsum(counts)
        draft = np.arange(len(request)) - (ends - counts + np.arange(len(counts)))[request]
        records = self._words[request].view(RECORD)[:, 0]
        records["position"] = np.asarray(positions)[request] + draft
        records["extra_start"] = (ends - counts)[request]
        records["extra_len"] = draft
        extra = _EMPTY_INT if draft_tokens is None else draft_tokens
        return RowParams(records, self._stop_ids, self._bias_ids, self._bias_values, history, extra)
