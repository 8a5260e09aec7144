"""What a step with several draft paths does on the device; here for CPUs, whose memory is the host's.

`triton_paths` does the same on GPUs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens and logprobs [requests, most drafts of a path + 1], and how many of them count [requests]."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A `PathLayout` on the device: int64, `further` its rows of further paths.

    Row i has the tokens from `bounds[i]` on, path i the rows of logits from `starts[i]` on; both have an end
    more. `longest`: tokens of a further path's row at most.
    """

    longest: int
    owners: torch.Tensor
    paths: torch.Tensor
    shorter: torch.Tensor
    shifts: torch.Tensor
    further: torch.Tensor
    firsts: torch.Tensor
    choices: torch.Tensor
    starts: torch.Tensor
    bounds: torch.Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """What V2 prepared for a step: [tokens], [rows of logits], [tokens]; changed in place."""

    positions: torch.Tensor
    places: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of further paths: `begins` [paths] are the positions at which they begin.

    In their rows `scratch` [paths, blocks] stand for `own`, the requests' blocks from there on, both int32.
    """

    begins: torch.Tensor
    own: torch.Tensor
    scratch: torch.Tensor


class PathOps:
    """Runs a step's work. `caches`: the KV of each layer, of `count` blocks; a block has `size` tokens."""

    def __init__(self, caches: Sequence[torch.Tensor], count: int, size: int) -> None:
        self._size = size
        self._caches = {cache.data_ptr(): cache for cache in caches}.values()  # layers may share one
        self._count = count
        self.decided = torch.zeros(2, dtype=torch.int64, device=caches[0].device)
        """How often a further path won, and how often a request's paths contradicted each other."""

    def begin(self, rows: Rows, inputs: Inputs, lengths: torch.Tensor, contexts: torch.Tensor) -> None:
        """Have further paths begin where their requests' drafts do.

        Writes to `contexts` the length of each row's context, by `lengths`, those of requests.
        """
        of_rows = lengths.numpy()[rows.owners.numpy()] - rows.shorter.numpy()
        contexts.numpy()[: len(of_rows)] = of_rows
        positions, places, ids = (
            each.numpy() for each in (inputs.positions, inputs.places, inputs.token_ids)
        )
        shifts, starts, paths = (each.numpy() for each in (rows.shifts, rows.starts, rows.paths))
        for row, begin, end in _spans(rows):
            shift, start = shifts[row], starts[paths[row]]
            positions[begin:end] -= shift
            places[start : start + end - begin] -= shift
            ids[begin] = ids[begin - shift]

    def attend(
        self,
        rows: Rows,
        positions: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        scratch: torch.Tensor,
    ) -> Blocks:
        """Put `scratch` blocks into further paths' rows of `table`, and into the `slots` of their tokens."""
        size, width = self._size, scratch.shape[1]
        begins, own = positions[rows.bounds[rows.further]], torch.zeros_like(scratch)
        blocks, spare, at, written = table.numpy(), scratch.numpy(), positions.numpy(), slots.numpy()
        for path, (row, begin, end) in enumerate(_spans(rows)):
            first = at[begin] // size
            there = blocks[row, first : first + width]
            own.numpy()[path, : len(there)] = there
            there[:] = spare[path, : len(there)]
            places, offsets = np.divmod(at[begin:end], size)
            written[begin:end] = spare[path, places - first].astype(np.int64) * size + offsets
        return Blocks(begins, own, scratch)

    def copy_before(self, rows: Rows, blocks: Blocks) -> None:
        """Have scratch blocks begin with what their requests' partly filled ones have."""
        partly = blocks.begins % self._size > 0
        self._copy(blocks.own[partly, 0].long(), blocks.scratch[partly, 0].long())

    def choose(
        self, rows: Rows, sampled: torch.Tensor, logprobs: torch.Tensor, gained: torch.Tensor
    ) -> tuple[torch.Tensor, Kept]:
        """Return the path that each request keeps, and what it drew; given are those of all paths.

        It is the first of the longest ones, and a request's first path if its paths contradict each other.
        """
        winners, won, conflicts = rows.firsts.clone(), 0, 0
        tokens, counts = sampled.numpy(), gained.tolist()
        choices = zip(rows.firsts.tolist(), rows.choices.tolist(), strict=True)
        for request, (first, count) in enumerate(choices):
            best, torn = first, False
            for path in range(first + 1, first + count):
                shared = min(counts[path], counts[best])
                if (tokens[path, :shared] != tokens[best, :shared]).any():
                    torn = True
                elif counts[path] > counts[best]:
                    best = path
            winners[request] = best = first if torn else best
            won, conflicts = won + (best != first), conflicts + torn
        self.decided += torch.tensor((won, conflicts))
        return winners, (sampled[winners], logprobs[winners], gained[winners])

    def copy_after(self, rows: Rows, blocks: Blocks, winners: torch.Tensor, gained: torch.Tensor) -> None:
        """Move to their requests' own blocks what further paths wrote that won; `gained` [paths]."""
        moved = self._moved(rows, blocks, winners, gained)
        self._copy(blocks.scratch[moved].long(), blocks.own[moved].long())

    def _moved(self, rows: Rows, blocks: Blocks, winners: torch.Tensor, gained: torch.Tensor) -> torch.Tensor:
        """Return which blocks [paths, blocks] have KV of winners' tokens."""
        verified = rows.paths[rows.further]
        # The last token has no KV yet.
        last = (blocks.begins + gained[verified] - 1) // self._size - blocks.begins // self._size
        places = torch.arange(blocks.own.shape[1], device=last.device)
        return (winners[rows.owners[rows.further]] == verified)[:, None] & (places <= last[:, None])

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for cache in self._caches if len(source) else ():
            blocks = cache.unflatten(0, (self._count, len(cache) // self._count))
            blocks[target] = blocks[source]


def _spans(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Return each further row with the tokens that it has from and to."""
    bounds = rows.bounds.numpy()
    for row in rows.further.tolist():
        yield row, bounds[row], bounds[row + 1]


def path_ops(caches: Sequence[torch.Tensor], count: int, size: int) -> PathOps:
    """Return what works on the device of a model's KV; see `PathOps`."""
    if caches[0].device.type == "cpu":
        return PathOps(caches, count, size)
    module = importlib.import_module("seer.services.engine.vllm.drafts.triton_paths")
    ops: PathOps = module.TritonPathOps(caches, count, size)
    return ops
