"""The matrix of `seer verify`: each cell is one way to schedule the same work.

Invariants:
- the first cell is the reference, and every other cell differs from the reference in what its name says;
  `sampled` cells are compared with a run that differs from the reference in sampling alone;
- only cells with `pool` have a KV pool, each its own pool that is empty at first, and only cells with
  `drafts` draft;
- a cell with a pool or drafts, or whose engine is killed, has engines of its own; other cells may share
  engines, and find no KV of each other there;
- a cell without the events that it needs (`needs`) proves nothing, and never counts as passed.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from seer.common.config import Config, PoolConfig
from seer.common.data_parallel import refusals
from seer.common.errors import InvalidField
from seer.common.policy.device_defaults import BLOCK_SIZE, CPU_MAX_NUM_SEQS, engine_defaults
from seer.common.types import Capacity
from seer.local import pool_plan
from seer.local.hardware import Hardware

Sampled = Literal["", "every", "structured"]
"""How a cell's sampling differs from the job's: `parameters.every_parameter`, `parameters.structured`."""

Need = tuple[str, str, str | int]
"""A counter, `>` or `==`, and a number or another counter."""

SCARCITY = 0.25
"""Sequences of uneven lengths that end at different times need about half of the sum at once."""

POOL_BLOCKS = 128
"""Enough for a pool to be lent room by its disk; a verification's sequences together have many more."""

LEAST_POOL_BYTES = 2**24
"""Mooncake refuses half of it."""

DISK_FACTOR = 16
"""Disk below a pool's memory, in sizes of that memory."""

MEMORY_TOKENS = 50_000_000
"""What a dgds may remember of a first run: more than a verification generates."""

_COMPARE = {">": operator.gt, "==": operator.eq}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A way to run. `buffer` and `engine` override those sections of the configuration.

    `scarce` leaves an engine too few KV blocks for what it runs at once, `disk` the pool too little
    memory for what it holds, and a disk below it. `killed`: the engine is killed halfway, and comes
    back. `again`: what counts is a second run, which drafts what the first one said. `exact`: its chunk
    size is what it is about. `sampled`: it is sampled otherwise than the job says, and has a reference of its
    own that is sampled so, too. `turns`: its responses have turns; `resent`: each one is sent as a prompt
    that knows nothing of the others. Counters for `needs` are those of `cell_run.CellRun`.
    """

    name: str
    about: str
    needs: tuple[Need, ...]
    instances: int = 1
    buffer: dict[str, str | int] = {}
    engine: dict[str, str | int | bool] = {}
    scarce: bool = False
    pool: bool = False
    disk: bool = False
    killed: bool = False
    data_parallel: int = 1
    drafts: Literal["off", "grouped", "random", "late"] = "off"
    again: bool = False
    exact: bool = False
    sampled: Sampled = ""
    turns: bool = False
    resent: bool = False

    @property
    def shares_engines(self) -> bool:
        """Whether its engines may have run another cell: nothing beside them keeps KV or drafts.

        Engines count what they compute from their start, which is what cells with turns are about.
        """
        return not (self.pool or self.killed or self.turns) and self.drafts == "off"

    def config(self, base: Config, lengths: Sequence[int] = ()) -> Config:
        """Return the configuration that this cell runs.

        `lengths` are those of the sequences in order of submission, for `scarce_blocks`.
        """
        engine = replace(base.engine, **self.engine)
        if self.data_parallel > 1:
            vllm = replace(engine.vllm, data_parallel_size=self.data_parallel, enable_expert_parallel=True)
            engine = replace(engine, vllm=vllm)
        if self.scarce:
            engine = replace(engine, kv_blocks=scarce_blocks(base, lengths, self.data_parallel))
        buffer = replace(base.buffer, **self.buffer)
        drafts = replace(base.drafts, source=self.drafts)
        dgds = replace(base.dgds, remember_tokens=MEMORY_TOKENS if self.again else 0)
        return replace(base, engine=engine, buffer=buffer, pool=self._pool(base), drafts=drafts, dgds=dgds)

    def _pool(self, base: Config) -> PoolConfig:
        here = PoolConfig()
        kind: Literal["mooncake", "none"] = "mooncake" if self.pool else "none"
        pool = replace(
            base.pool, kind=kind, master=here.master, metrics=here.metrics, pull_tokens=0, ssd_gib=0.0
        )
        if not self.disk:
            return pool
        gib = scarce_pool_bytes(base) / 2**30
        return replace(pool, dram_gib=gib, ssd_gib=DISK_FACTOR * gib, lease_seconds=1.0)

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
        exact=True,
        needs=(("chunks", ">", "responses"),),
    )


_DRAFTED: tuple[Need, ...] = (("accepted_tokens", ">", 0), ("drafted_tokens", ">", "accepted_tokens"))
_STOPPED: tuple[Need, ...] = (("text_stops", ">", 0), ("id_stops", ">", 0))


def _matrix(*cells: Cell) -> dict[str, Cell]:
    return {cell.name: cell for cell in cells}


CELLS = _matrix(
    Cell(
        name="one-go", about="each response in one go: the reference", buffer={"policy": "static"},
        needs=(("chunks", "==", "responses"), ("preemptions", "==", 0)),
    ),
    _chunked(1),
    _chunked(16),
    _chunked(64),
    Cell(
        name="sampling", about="chunks of 7, with every sampling parameter", sampled="every",
        buffer={"policy": "divided", "chunk_size": 7}, needs=(("chunks", ">", "responses"), *_STOPPED),
    ),
    Cell(
        name="structured", about="text that a regex constrains, every chunk of 7 on another engine",
        instances=2, sampled="structured", buffer={"policy": "migrate", "chunk_size": 7},
        needs=(("migrations", ">", 0),),
    ),
    Cell(
        name="two-instances", about="chunks of 64 on two engines", instances=2,
        buffer={"policy": "divided", "chunk_size": 64},
        needs=(("engines_used", "==", 2), ("chunks", ">", "responses")),
    ),
    Cell(
        name="migrate", about="every chunk on another engine", instances=2,
        buffer={"policy": "migrate", "chunk_size": 64}, needs=(("migrations", ">", 0),),
    ),
    Cell(
        name="preempt", about="a quarter of the KV memory", buffer={"policy": "static"}, scarce=True,
        needs=(("preemptions", ">", 0),),
    ),
    Cell(
        name="synchronous", about="chunks of 16, each step begun once the last one is read",
        buffer={"policy": "divided", "chunk_size": 16}, engine={"async_scheduling": False},
        needs=(("chunks", ">", "responses"),),
    ),
    Cell(
        name="tp-2", about="two tensor-parallel ranks", buffer={"policy": "static"},
        engine={"tensor_parallel": 2}, needs=(("tensor_parallel", "==", 2),),
    ),
    Cell(
        name="dp-2", about="chunks of 16 on two data-parallel ranks, each with half of the experts",
        data_parallel=2, buffer={"policy": "divided", "chunk_size": 16},
        needs=(("data_parallel", "==", 2), ("dummy_steps", ">", 0), ("chunks", ">", "responses")),
    ),
    Cell(
        name="pool-migrate",
        about="every chunk on another engine with a quarter of the KV memory, and a pool", instances=2,
        scarce=True,  # what moves at once may be asked for before it is saved; what was evicted is not
        pool=True, buffer={"policy": "migrate", "chunk_size": 32},
        needs=(("migrations", ">", 0), ("pool_tokens", ">", 0)),
    ),
    Cell(
        name="pool-warm", about="an engine killed halfway, what it had computed from the pool", pool=True,
        killed=True, buffer={"policy": "seer", "chunk_size": 32},
        needs=(("restarts", ">", 0), ("pool_tokens", ">", 0)),
    ),
    Cell(
        name="pool-ssd", about="a quarter of the KV memory, and a pool that keeps most on disk", scarce=True,
        pool=True, disk=True, buffer={"policy": "seer", "chunk_size": 32},
        needs=(("pool_tokens", ">", 0), ("pool_ssd_reads", ">", 0), ("preemptions", "==", 0)),
    ),
    Cell(
        name="pool-tp-2", about="two tensor-parallel ranks, a quarter of the KV memory, and a pool",
        scarce=True, pool=True, engine={"tensor_parallel": 2}, buffer={"policy": "seer", "chunk_size": 32},
        needs=(("tensor_parallel", "==", 2), ("pool_tokens", ">", 0), ("preemptions", "==", 0)),
    ),
    Cell(
        name="pool-dp-2", about="two data-parallel ranks, a quarter of the KV memory, and a pool",
        scarce=True, pool=True, data_parallel=2, buffer={"policy": "seer", "chunk_size": 32},
        needs=(("data_parallel", "==", 2), ("pool_tokens", ">", 0), ("preemptions", "==", 0)),
    ),
    Cell(
        name="drafts",
        about="drafts from siblings, every chunk on another engine, a quarter of the KV memory, a pool",
        instances=2, scarce=True, pool=True, drafts="grouped", buffer={"policy": "migrate", "chunk_size": 32},
        needs=(*_DRAFTED, ("migrations", ">", 0), ("pool_tokens", ">", 0), ("preemptions", "==", 0)),
    ),
    Cell(
        name="drafts-right", about="chunks of 16, drafted from a first run of the same", drafts="grouped",
        again=True, buffer={"policy": "seer", "chunk_size": 16}, needs=_DRAFTED,
    ),
    Cell(
        name="drafts-sampling",
        about="chunks of 16 with every sampling parameter, drafted from a first run of the same",
        drafts="grouped", again=True, sampled="every", buffer={"policy": "seer", "chunk_size": 16},
        needs=(*_DRAFTED, *_STOPPED),
    ),
    Cell(
        name="drafts-random",
        about="random drafts on several paths, of other lengths each time, every chunk on another engine",
        instances=2, drafts="random", buffer={"policy": "migrate", "chunk_size": 32},
        needs=(("drafted_tokens", ">", "verifications"), ("migrations", ">", 0)),
    ),
    Cell(
        name="drafts-late",
        about="chunks of 16, drafted from a first run of the same, but late or not at all", drafts="late",
        again=True, buffer={"policy": "seer", "chunk_size": 16}, needs=_DRAFTED,
    ),
    Cell(
        name="drafts-tp-2", about="drafted from a first run of the same, two tensor-parallel ranks",
        drafts="grouped", again=True,
        engine={"tensor_parallel": 2}, buffer={"policy": "divided", "chunk_size": 64},
        needs=(*_DRAFTED, ("tensor_parallel", "==", 2)),
    ),
)  # fmt: skip

TURN_CELLS = _matrix(
    Cell(
        name="turns-one-go", about="each turn in one go, as a request of its own: the reference", turns=True,
        resent=True, buffer={"policy": "static"},
        needs=(("chunks", ">", "responses"), ("migrations", "==", 0), ("preemptions", "==", 0)),
    ),
    Cell(
        name="turns-migrate", about="every chunk and turn on another engine", turns=True, instances=2,
        buffer={"policy": "migrate", "chunk_size": 32}, needs=(("migrations", ">", "responses"),),
    ),
    Cell(
        name="turns-pool",
        about="every chunk and turn on another engine with a quarter of the KV memory, and a pool",
        turns=True, instances=2, scarce=True, pool=True, buffer={"policy": "migrate", "chunk_size": 32},
        needs=(("migrations", ">", "responses"), ("pool_tokens", ">", 0), ("preemptions", "==", 0)),
    ),
    Cell(
        name="turns-recompute", about="a quarter of the KV memory, so that contexts are computed again",
        turns=True, scarce=True, buffer={"policy": "seer"},
        needs=(("computed_tokens", ">", "context_tokens"), ("preemptions", "==", 0)),
    ),
)  # fmt: skip
"""With `--turns`; the first one is their reference."""


def settled(base: Config, machine: Hardware) -> Config:
    """Return the configuration with those defaults set that cells are made for, as the machine has them."""
    described = _described(base) if base.engine.backend == "vllm" else {}
    default = engine_defaults(
        machine.devices, base.engine.tensor_parallel, described,
        attention_backend=base.engine.vllm.attention_backend,
    )  # fmt: skip
    return replace(
        base,
        shared=replace(base.shared, block_size=base.shared.block_size or default.block_size),
        # As on CPUs, whatever a device could run at once: more requests would leave cells nothing to preempt.
        engine=replace(base.engine, max_num_seqs=sequences(base)),
    )


def block_size(base: Config) -> int:
    """Return the tokens of a KV block."""
    return base.shared.block_size or BLOCK_SIZE


def sequences(base: Config) -> int:
    """Return how many requests an engine runs at once."""
    return base.engine.max_num_seqs or CPU_MAX_NUM_SEQS


def scarce_blocks(base: Config, lengths: Sequence[int], ranks: int = 1) -> int:
    """Return KV blocks for one longest sequence, or a `SCARCITY` of the first to run if that is more.

    Each of several data-parallel `ranks` has its part of that.
    vLLM admits a sequence when its prompt fits, so memory for a share of all makes it preempt; with
    still less it would do little else. `lengths` count prompt and response.
    """
    capacity = Capacity(
        kv_blocks=0,
        block_size=block_size(base),
        max_num_seqs=sequences(base),
        max_model_len=base.engine.max_model_len or max(lengths, default=0),
    )
    at_once = sum(capacity.blocks_for(length, 0) for length in lengths[: capacity.max_num_seqs])
    return max(capacity.blocks_for(capacity.max_model_len, 0), int(at_once * SCARCITY / ranks))


def scarce_pool_bytes(base: Config) -> int:
    """Return memory for `POOL_BLOCKS` blocks, or `LEAST_POOL_BYTES` if that is more.

    A number is counted with 2 bytes, and any layer as one of full attention.
    """
    return max(LEAST_POOL_BYTES, POOL_BLOCKS * block_bytes(base, 2))


def block_bytes(base: Config, value_bytes: int) -> int:
    """Return the bytes of a KV block, or 0 where the model's description does not tell."""
    model = _described(base)
    heads = model.get("num_attention_heads") or 1
    size = model.get("head_dim") or model.get("hidden_size", 0) // heads
    numbers = 2 * model.get("num_hidden_layers", 0) * (model.get("num_key_value_heads") or heads) * size
    return block_size(base) * numbers * value_bytes


def choose(
    names: str, config: Config, machine: Hardware, matrix: Mapping[str, Cell] = CELLS
) -> tuple[list[Cell], dict[str, str]]:
    """Return the cells of a matrix to run, the reference first, and why others cannot run here.

    `names` is comma-separated; empty means every cell that can run. Raises `InvalidField` for a
    cell that is unknown or cannot run.
    """
    reference, *others = matrix.values()
    poolless = _poolless(config)
    reasons = {name: _why_not(cell, config, machine, poolless) for name, cell in matrix.items()}
    cannot = {name: why for name, why in reasons.items() if why}
    wanted = [name.strip() for name in names.split(",")] if names else [n for n in matrix if n not in cannot]
    for name in wanted:
        if name not in matrix:
            raise InvalidField("--matrix", name, f"choose among {', '.join(matrix)}")
        if name in cannot:
            raise InvalidField("--matrix", name, cannot[name])
    cells = [cell for cell in others if cell.name in wanted]
    if not cells:
        raise InvalidField("--matrix", names, f"name a cell to compare with {reference.name}, the reference")
    return [reference, *cells], {} if names else cannot


def _poolless(config: Config) -> str:
    """Return why no cell can have a KV pool."""
    if config.engine.backend != "vllm":
        return f"the {config.engine.backend} backend has no KV"
    if config.pool.kind == "none":  # its ports are open to whoever reaches them: it is not forced on anybody
        return "pool.kind = none"
    problem = pool_plan.import_problem()
    return f"Mooncake cannot be imported ({problem})" if problem else ""


def _why_not(cell: Cell, config: Config, machine: Hardware, poolless: str) -> str:
    """Return why a cell cannot run here, or would not differ from the reference."""
    ranks = cell.engine.get("tensor_parallel")
    if cell.pool and poolless:
        return poolless
    if cell.data_parallel > 1 and (why := _no_data_parallelism(cell.data_parallel, config, machine)):
        return why
    if ranks == config.engine.tensor_parallel:
        return f"the reference has {ranks} ranks itself"
    if config.engine.backend != "vllm":
        lacks = (
            (cell.drafts != "off", "does not draft"),
            (cell.sampled != "", "does not sample"),
            (ranks is not None, "has no tensor parallelism"),
            ("async_scheduling" in cell.engine, "does not schedule ahead"),
        )
        return next((f"the {config.engine.backend} backend {what}" for needed, what in lacks if needed), "")
    if cell.sampled == "structured" and not (Path(config.shared.model) / "tokenizer.json").exists():
        return "the model has no tokenizer.json, which constraints on text need"
    if isinstance(ranks, int):
        units = machine.devices or machine.cores
        if len(units) < ranks:
            return f"needs {ranks} {'devices' if machine.devices else 'cores'}; this machine has {len(units)}"
        heads = _described(config).get("num_attention_heads", 0)
        return f"the model's {heads} attention heads cannot be divided by {ranks}" if heads % ranks else ""
    if "async_scheduling" in cell.engine and config.engine.async_scheduling is False:
        return "the reference takes one step at a time itself"
    if "async_scheduling" in cell.engine and not machine.devices:
        return "vLLM schedules ahead on GPUs alone"
    return ""


def _no_data_parallelism(ranks: int, config: Config, machine: Hardware) -> str:
    """Return why there cannot be so many data-parallel ranks here; empty: there can."""
    if config.engine.backend != "vllm":
        return f"the {config.engine.backend} backend has no data parallelism"
    if max(config.engine.vllm.data_parallel_size, config.engine.tensor_parallel) > 1:
        return "the reference has ranks itself"
    engine = replace(config.engine, vllm=replace(config.engine.vllm, data_parallel_size=ranks))
    for what, now, _, why in refusals(engine, _described(config)):
        return f"{what} = {now}: {why}"
    units = machine.devices or machine.cores
    if len(units) < ranks:
        return f"needs {ranks} {'devices' if machine.devices else 'cores'}; this machine has {len(units)}"
    return ""


def _described(config: Config) -> dict[str, int]:
    """Return the whole numbers of the model's description; what it does not say, the engine will."""
    model = json.loads((Path(config.shared.model) / "config.json").read_text())
    described = model.get("text_config") or model
    return {name: value for name, value in described.items() if isinstance(value, int)}
