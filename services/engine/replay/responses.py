"""Responses for the replay engine: synthetic ones that follow from the request's key, or those of a trace.

Invariants:
- a synthetic token or logprob is a function of (key, absolute position), a turn's synthetic length of
  (key, context before it): chunking, batching and preemption change nothing;
- synthetic lengths are log-normal with the configured mean; responses to equal prompts share
  `PROMPT_SHARE` of the variance of their logarithm.

A trace is JSON lines, one recorded response each:
`{"id": "<prompt id>", "token_ids": [...], "index": 3, "logprobs": [...]}`. `index` defaults to the
number of earlier lines of the same prompt; a request whose index was not recorded reads the one
at its index modulo the number recorded. Without `logprobs` they are synthetic. A recorded response is
replayed up to max_tokens; min_tokens and ignore_eos have no effect on it. It has one turn.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from seer.common.errors import NOT_DECODED, EngineError, InvalidField
from seer.services.engine.backend import Chunk

LENGTH_SIGMA = 1.0
"""Spread of log length: the 99th percentile is 6 times the mean, as in the paper's workloads."""

PROMPT_SHARE = 0.65
"""Part of the variance of log length that responses to one prompt share (TailSieve, Qwen 2026)."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOGPROB_STREAM = 0x6C6F6770726F6273
_LENGTH_STREAM = 0x6C656E6774687321
_NORMAL = statistics.NormalDist()


class SyntheticResponses:
    """Uniform tokens below `vocab_size`; log-normal lengths of mean `mean_tokens`."""

    def __init__(self, vocab_size: int, mean_tokens: int) -> None:
        self._vocab_size = np.uint64(vocab_size)
        self._mu = math.log(mean_tokens) - LENGTH_SIGMA**2 / 2

    def length(self, chunk: Chunk) -> int:
        """Return how many tokens the turn that `chunk` belongs to has if max_tokens allows it.

        min_tokens and ignore_eos are kept.
        """
        if chunk.sampling.ignore_eos:
            return chunk.sampling.max_tokens + 1
        context = np.asarray(chunk.tokens[: chunk.counts_from], dtype=np.int32).tobytes()
        of_context = int.from_bytes(hashlib.blake2b(context, digest_size=8).digest(), "little")
        score = math.sqrt(PROMPT_SHARE) * _normal(of_context)
        score += math.sqrt(1 - PROMPT_SHARE) * _normal(chunk.key)
        return max(1, chunk.sampling.min_tokens, round(math.exp(self._mu + LENGTH_SIGMA * score)))

    def part(self, chunk: Chunk, start: int, count: int) -> tuple[list[int], list[float]]:
        """Return token ids and logprobs of `count` positions from `start` on, counted within the turn."""
        tokens = _words(chunk.key, chunk.counts_from + start, count) % self._vocab_size
        return tokens.tolist(), synthetic_logprobs(chunk, start, count)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    token_ids: list[int]
    index: int | None = None
    logprobs: list[float] | None = None


class TraceResponses:
    """The responses of a trace file; raises `EngineError` naming the line that cannot be used."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._lines: dict[str, dict[int, _Line]] = {}
        try:
            text = path.read_bytes()
        except OSError as error:
            raise EngineError(f"engine.replay.trace = {path}: {error.strerror}; give a JSONL file") from error
        for number, row in enumerate(text.splitlines(), start=1):
            if row.strip():
                self._read(row, f"engine.replay.trace = {path}: line {number}", vocab_size)

    def _read(self, row: bytes, where: str, vocab_size: int) -> None:
        try:
            line = msgspec.json.decode(row, type=_Line)
        except NOT_DECODED as error:
            raise EngineError(f"{where}: {error}") from error
        if not line.token_ids or not all(0 <= token < vocab_size for token in line.token_ids):
            raise EngineError(
                f"{where}: give token_ids below engine.replay.vocab_size = {vocab_size}, 1 or more"
            )
        if line.logprobs is not None and len(line.logprobs) != len(line.token_ids):
            raise EngineError(f"{where}: logprobs must have one entry per token")
        known = self._lines.setdefault(line.id, {})
        index = len(known) if line.index is None else line.index
        if index in known:
            raise EngineError(f"{where}: index {index} of prompt {line.id} was recorded before")
        known[index] = line

    def length(self, chunk: Chunk) -> int:
        """See `SyntheticResponses.length`."""
        return len(self._line(chunk).token_ids)

    def part(self, chunk: Chunk, start: int, count: int) -> tuple[list[int], list[float]]:
        """See `SyntheticResponses.part`."""
        line = self._line(chunk)
        logprobs = synthetic_logprobs(chunk, start, count) if line.logprobs is None else line.logprobs[start:]
        return line.token_ids[start : start + count], logprobs[:count]

    def _line(self, chunk: Chunk) -> _Line:
        if chunk.counts_from != chunk.prompt_len:
            fix = "a trace has responses of one turn; run without engine.replay.trace"
            raise InvalidField("turn_start", chunk.turn_start, fix)
        prompt_id, _, index = chunk.request_id.partition("/")[2].rpartition("#")
        known = self._lines.get(prompt_id)
        if known is None:
            raise InvalidField("prompt id", prompt_id, "is not in the trace; submit recorded prompts")
        number = int(index)
        return known[number] if number in known else known[sorted(known)[number % len(known)]]


def synthetic_logprobs(chunk: Chunk, start: int, count: int) -> list[float]:
    """Return logprobs in (-2, 0], functions of (key, absolute position) that float32 holds exactly."""
    words = _words(chunk.key ^ _LOGPROB_STREAM, chunk.counts_from + start, count) >> np.uint64(41)
    logprobs: list[float] = (words.astype(np.float64) * -(2.0**-22)).tolist()
    return logprobs


def _words(key: int, start: int, count: int) -> NDArray[np.uint64]:
    """Return splitmix64 (Steele, Lea, Flood, OOPSLA 2014) of positions `start`...: uint64 [count]."""
    positions = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    words = np.uint64(key) + positions * _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _normal(key: int) -> float:
    """Return a standard normal score that is a function of a 64-bit key."""
    word = int(_words(key ^ _LENGTH_STREAM, 0, 1)[0])
    return _NORMAL.inv_cdf(((word >> 11) + 0.5) * 2.0**-53)
