"""Makes a workload exercise a cell: smaller chunks, more responses per prompt; or says why it cannot.

Invariants:
- a cell is never fitted to more than `MOST_RESPONSES` responses in all, nor to fewer than asked for;
- what a fitted cell runs has the same tokens as what it stands for: chunk sizes and the number of
  responses change none of them;
- a cell whose name says its chunk size (`exact`) keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from seer.common.config import Config
from seer.verify.cells import Cell, block_bytes, block_size, scarce_pool_bytes, sequences

MOST_RESPONSES = 768
"""In all, per cell; a tiny model on one CPU core takes about a minute for them."""

OVERFLOW = 1.5
"""Blocks needed at once over those there are, where some must not suffice; lengths of others differ."""

DISK_OVERFLOW = 3.0
"""Likewise for a pool's memory: not all that is under way is in the pool."""

DRAFT_TOKENS, DRAFT_SIBLINGS = 500, 4
"""Tokens in all, and responses per prompt, of which some drafts are right and some wrong."""

POOL_TOKENS = 500
"""Tokens in all, where what moves may be asked for before it is saved."""

KILL_TOKENS = 2_000
"""Tokens in all, where an engine is to be killed before all of them are there."""

MORE = 1.2
"""Factor on estimates of tokens: responses differ in length."""


class Work(msgspec.Struct, frozen=True):
    """What the reference did: per prompt, its length and its responses' lengths in tokens."""

    prompts: list[int]
    outputs: list[list[int]]

    @property
    def n(self) -> int:
        """Responses per prompt."""
        return len(self.outputs[0])

    @property
    def tokens(self) -> int:
        """All tokens of responses."""
        return sum(map(sum, self.outputs))

    def grown(self, n: int) -> list[tuple[int, int]]:
        """Return (prompt, response) lengths for n responses per prompt, in order of submission.

        Unknown lengths are like known ones.
        """
        return [
            (prompt, outputs[i % len(outputs)])
            for prompt, outputs in zip(self.prompts, self.outputs, strict=True)
            for i in range(n)
        ]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A cell as this workload can exercise it, with `n` responses per prompt; or `why` it cannot."""

    cell: Cell
    n: int
    why: str = ""


def fit(cell: Cell, base: Config, work: Work, value_bytes: int = 2) -> Fit:
    """Fit a cell to a workload. `value_bytes`: the bytes of one number of the KV cache."""
    cell, why = _chunked(cell, block_size(base), work)
    if why:
        return Fit(cell=cell, n=work.n, why=why)
    most = max(work.n, MOST_RESPONSES // len(work.prompts))
    n = min(max(work.n, _least(cell, work)), most)
    if not cell.scarce or (cell.instances > 1):
        return Fit(cell=cell, n=n)
    while not _overflows(cell, base, work, n, value_bytes):
        if n >= most:
            what = "a KV pool's smallest memory" if cell.disk else "the KV memory of one longest sequence"
            return Fit(cell=cell, n=n, why=f"{n * len(work.prompts)} such responses at once fit into {what}")
        n = min(n + max(1, n // 4), most)
    return Fit(cell=cell, n=n)


def n_for_tokens(work: Work, tokens: int) -> int:
    """Return the responses per prompt that have so many tokens, within bounds."""
    n = -(-int(MORE * tokens) * work.n // max(work.tokens, 1)) if work.tokens < tokens else work.n
    return max(work.n, min(n, MOST_RESPONSES // len(work.prompts)))


def _chunked(cell: Cell, block: int, work: Work) -> tuple[Cell, str]:
    """Give a cell chunks that responses have several of, and whole KV blocks before the last one."""
    size = cell.buffer.get("chunk_size")
    pairs = work.grown(work.n)
    longest = max(output for _, output in pairs)
    if cell.pool:
        # A chunk that ends at a whole block or later, and before the response does.
        after = max(output - max(0, block - prompt) for prompt, output in pairs)
        if after < 2:
            return cell, f"no sequence outgrows a KV block of {block} tokens: there is nothing to share"
        longest = after
    if not isinstance(size, int):
        return cell, ""
    if cell.exact:
        return cell, f"no response is longer than {size} tokens" if longest <= size else ""
    if longest < 2:
        return cell, "no response is longer than one token"
    size = min(size, longest // 2)
    return msgspec.structs.replace(cell, buffer=cell.buffer | {"chunk_size": size}), ""


def _least(cell: Cell, work: Work) -> int:
    n = 1
    if cell.instances > 1:
        n = -(-2 * cell.instances // len(work.prompts))
    if cell.drafts != "off":
        n = max(DRAFT_SIBLINGS, n_for_tokens(work, DRAFT_TOKENS))
    if cell.pool and cell.instances > 1:
        n = max(n, n_for_tokens(work, POOL_TOKENS))
    if cell.killed:
        n = max(n, n_for_tokens(work, KILL_TOKENS))
    return n


def _overflows(cell: Cell, base: Config, work: Work, n: int, value_bytes: int) -> bool:
    pairs = work.grown(n)
    block = block_size(base)
    if cell.disk:
        memory = scarce_pool_bytes(base) // max(1, block_bytes(base, value_bytes))
        return peak_blocks(pairs, block, whole=True) > DISK_OVERFLOW * memory
    config = cell.config(base, [prompt + output for prompt, output in pairs])
    at_once = pairs if cell.pool else pairs[: sequences(config)]
    return peak_blocks(at_once, block) > OVERFLOW * (config.engine.kv_blocks or 1)


def peak_blocks(pairs: Sequence[tuple[int, int]], block: int, *, whole: bool = False) -> int:
    """Return the most KV blocks that sequences have at once if all advance together; `whole`: full ones."""
    prompts, outputs = (np.array(each) for each in zip(*pairs, strict=True))
    most = 0
    for done in range(0, int(outputs.max()), max(1, block // 2)):
        lengths = (prompts + done)[outputs > done]
        most = max(most, int((lengths // block if whole else -(-lengths // block)).sum()))
    return most
