"""The matrix of `seer verify`: each cell is one way to schedule the same work.

Invariants:
- the first cell is the reference, and every other one differs from it in what its name says;
- a cell that did not do what it is there for (`needs`) proves nothing, and counts as failed.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from seer.common.config import Config
from seer.common.errors import InvalidField
from seer.common.types import Capacity
from seer.hardware import Machine

Need = tuple[str, str, str | int]
"""A counter, `>` or `==`, and a number or another counter."""

SCARCITY = 0.25
"""Sequences of uneven lengths that end at different times need about half of the sum at once."""

_COMPARE = {">": operator.gt, "==": operator.eq}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A way to run. `buffer` and `engine` override those sections of the configuration.

    `scarce` leaves an engine too few KV blocks for what it runs at once. Counters for `needs` are
    those of `run.CellRun`.
    """

    name: str
    about: str
    needs: tuple[Need, ...]
    instances: int = 1
    buffer: dict[str, str | int] = {}
    engine: dict[str, str | int] = {}
    scarce: bool = False

    def config(self, base: Config, lengths: Sequence[int] = ()) -> Config:
        """Return the configuration that this cell runs.

        `lengths` are those of the sequences in order of submission, for `scarce_blocks`.
        """
        engine = msgspec.structs.replace(base.engine, **self.engine)
        if self.scarce:
            engine = msgspec.structs.replace(engine, kv_blocks=scarce_blocks(base, lengths))
        buffer = msgspec.structs.replace(base.buffer, **self.buffer)
        return msgspec.structs.replace(base, engine=engine, buffer=buffer)

    def unmet(self, counters: Mapping[str, int]) -> list[str]:
        """Return what this cell was to exercise and did not, as text."""
        missed = []
        for name, sign, bound in self.needs:
            limit = counters[bound] if isinstance(bound, str) else bound
            if not _COMPARE[sign](counters[name], limit):
                missed.append(f"{name} {sign} {bound} (was {counters[name]})")
        return missed


def _chunked(size: int) -> Cell:
    return Cell(
        name=f"chunk-{size}",
        about=f"chunks of {size}",
        buffer={"policy": "divided", "chunk_size": size},
        needs=(("chunks", ">", "responses"),),
    )


CELLS: dict[str, Cell] = {
    cell.name: cell
    for cell in (
        Cell(
            name="one-go",
            about="each response in one go: the reference",
            buffer={"policy": "static"},
            needs=(("chunks", "==", "responses"), ("preemptions", "==", 0)),
        ),
        _chunked(1),
        _chunked(16),
        _chunked(64),
        Cell(
            name="two-instances",
            about="chunks of 64 on two engines",
            instances=2,
            buffer={"policy": "divided", "chunk_size": 64},
            needs=(("engines_used", "==", 2), ("chunks", ">", "responses")),
        ),
        Cell(
            name="migrate",
            about="every chunk on another engine",
            instances=2,
            buffer={"policy": "migrate", "chunk_size": 64},
            needs=(("migrations", ">", 0),),
        ),
        Cell(
            name="preempt",
            about="a quarter of the KV memory",
            buffer={"policy": "static"},
            scarce=True,
            needs=(("preemptions", ">", 0),),
        ),
        Cell(
            name="tp-2",
            about="two tensor-parallel ranks",
            buffer={"policy": "static"},
            engine={"tensor_parallel": 2},
            needs=(("tensor_parallel", "==", 2),),
        ),
    )
}

REFERENCE = next(iter(CELLS.values()))


def scarce_blocks(base: Config, lengths: Sequence[int]) -> int:
    """Return KV blocks for one longest sequence, or a `SCARCITY` of the first to run if that is more.

    vLLM admits a sequence when its prompt fits, so memory for a share of all makes it preempt; with
    still less it would do little else. `lengths` count prompt and response.
    """
    capacity = Capacity(
        kv_blocks=0,
        block_size=base.shared.block_size,
        max_num_seqs=base.engine.max_num_seqs,
        max_model_len=base.engine.max_model_len or max(lengths, default=0),
    )
    at_once = sum(capacity.blocks_for(length, 0) for length in lengths[: capacity.max_num_seqs])
    return max(capacity.blocks_for(capacity.max_model_len, 0), int(at_once * SCARCITY))


def choose(names: str, config: Config, machine: Machine) -> tuple[list[Cell], dict[str, str]]:
    """Return the cells to run, the reference first, and why others cannot run here.

    `names` is comma-separated; empty means every cell that can run. Raises `InvalidField` for a
    cell that is unknown or cannot run.
    """
    cannot = {name: why for name, cell in CELLS.items() if (why := _obstacle(cell, config, machine))}
    wanted = [name.strip() for name in names.split(",")] if names else [n for n in CELLS if n not in cannot]
    for name in wanted:
        if name not in CELLS:
            raise InvalidField("--matrix", name, f"choose among {', '.join(CELLS)}")
        if name in cannot:
            raise InvalidField("--matrix", name, cannot[name])
    cells = [cell for name, cell in CELLS.items() if name in wanted and cell is not REFERENCE]
    if not cells:
        raise InvalidField("--matrix", names, f"name a cell to compare with {REFERENCE.name}, the reference")
    return [REFERENCE, *cells], {} if names else cannot


def _obstacle(cell: Cell, config: Config, machine: Machine) -> str:
    ranks = cell.engine.get("tensor_parallel")
    if not isinstance(ranks, int):
        return ""
    if ranks == config.engine.tensor_parallel:
        return f"the reference has {ranks} ranks itself"
    if config.engine.backend != "vllm":
        return f"the {config.engine.backend} backend has no tensor parallelism"
    units = machine.devices or machine.cores
    if len(units) < ranks:
        return f"needs {ranks} {'devices' if machine.devices else 'cores'}; this machine has {len(units)}"
    heads = _attention_heads(Path(config.shared.model))
    return f"the model's {heads} attention heads cannot be divided by {ranks}" if heads % ranks else ""


def _attention_heads(folder: Path) -> int:
    """Return the model's attention heads, 0 if its folder does not say: the engine will."""
    described = json.loads((folder / "config.json").read_text())
    heads = (described.get("text_config") or described).get("num_attention_heads")
    return heads if isinstance(heads, int) else 0
