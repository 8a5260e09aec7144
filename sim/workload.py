"""Workloads: how long responses are, and the clusters that generate them.

Lengths are log-normal on two levels: log L = prompt effect + sample effect, where the prompt's share of the
variance is `between`. A share `outliers` of the samples is `OUTLIER` times as long; lengths above `cap` are
cut. The median is chosen such that the mean is `mean`.

Invariants (tests/unit/test_sim_workload.py asserts them):
- lengths are a function of (workload, seed), the same for every policy;
- their mean over many seeds is `mean`, and all are from 1 to `cap`;
- a step of `Model` never gets faster with more requests, more rows or more KV.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from seer.common.errors import InvalidField
from seer.common.types import MAX_IDLE_SECONDS, Capacity

DISPATCH_SECONDS = 0.01
"""From the end of a chunk to the first step of the next: two messages and a scheduler step."""

OUTLIER = 2.5
"""Factor by which outliers are longer."""

TUNING_SEED = 1000
"""Seeds from here on are for fitting and for tuning policies; results use smaller ones."""

_NORMAL = statistics.NormalDist()


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of a step: T = a + b x rows + max(0, f x rows - w) + KV tokens x max(c, d x rows per request).

    All in seconds. `step` (a) and `request` (b) are fitted, the others follow from the hardware. Each request
    has a row, and one for each drafted token. `row` (f) is the compute of a row; it overlaps with reading
    the weights, which takes `weights` (w). `kv` (c) reads the KV of one token, once for all rows of its
    request; `attend` (d) computes one row's attention to it, which dominates where KV is compressed.
    `prefill` computes one prompt token, `pull` brings one token's KV over a node's link. `kv_tokens` tokens
    of `kv_bytes` each fit beside the weights; `kv_bytes` is used in reports only (0: unknown). The buffer
    reserves room for `draft_tokens` of a request.
    """

    step: float
    request: float
    kv: float
    attend: float
    row: float
    weights: float
    prefill: float
    pull: float
    kv_tokens: int
    kv_bytes: int = 0
    block_size: int = 16
    max_num_seqs: int = 1024
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("step", "request", "kv", "attend", "row", "weights", "prefill", "pull"):
            value = getattr(self, name)
            if not 0 <= value < math.inf or (name == "step" and value == 0):
                raise InvalidField(f"model.{name}", value, "give seconds, not negative; step above 0")
        if min(self.kv_tokens, self.block_size, self.max_num_seqs) < 1:
            raise InvalidField("model.kv_tokens", self.kv_tokens, "sizes must be 1 or more")

    def seconds(self, requests: int, drafted: float, kv_tokens: float) -> float:
        """Return the time of one decode step."""
        rows = requests + drafted
        compute = max(0.0, self.row * rows - self.weights)
        return self.step + self.request * rows + compute + self.read(requests, drafted) * kv_tokens

    def read(self, requests: int, drafted: float) -> float:
        """Return the seconds that each token of KV adds to such a step."""
        return max(self.kv, self.attend * (requests + drafted) / max(requests, 1))


class Accepted(NamedTuple):
    """What a step had for each of `batch` requests of `context` tokens: new tokens, and drafted tokens."""

    batch: float
    context: float
    tokens: float
    drafted: float


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rollout of `groups` prompts x `group_size` responses on `instances` engines.

    `lengths` are recorded lengths by group; if empty they are drawn from `mean`, `cap`, `sigma` (of log
    length), `between` and `outliers`. With `turns` above 1 responses are trajectories of that many turns on
    average, and `cap` counts what tools add as well; `sim/turns.py` has what the `tool_` fields mean.
    `pool`: instances share a KV pool; else what one does not have it computes again. `node_instances` of them
    share a node, and its links. An instance has `ranks` data-parallel ranks, with equal parts of its KV. A
    chunk takes `dispatch` seconds on its way to an instance and back, beside fetches.
    `prompts` are recorded lengths of prompts by group, of which `prompt` is the shortest; then a response
    finds the full blocks of its prompt where another one to it has run. `acceptance`: `sim/drafting.py`.
    Raises `InvalidField`.
    """

    name: str
    instances: int
    groups: int
    group_size: int
    cap: int
    model: Model
    mean: float = 0.0
    sigma: float = 0.9
    between: float = 0.65
    outliers: float = 0.05
    prompt: int = 512
    lengths: tuple[tuple[int, ...], ...] = ()
    turns: float = 1.0
    tool_tokens: float = 0.0
    tool_seconds: float = 0.0
    tool_sigma: float = 1.2
    pool: bool = True
    node_instances: int = 1
    ranks: int = 1
    dispatch: float = DISPATCH_SECONDS
    prompts: tuple[int, ...] = ()
    acceptance: tuple[Accepted, ...] = ()

    def __post_init__(self) -> None:
        for name in ("instances", "groups", "group_size", "cap", "prompt", "node_instances", "ranks"):
            if getattr(self, name) < 1:
                raise InvalidField(f"workload.{name}", getattr(self, name), "must be 1 or more")
        for name in ("between", "outliers"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidField(f"workload.{name}", getattr(self, name), "must be in [0, 1]")
        if not self.lengths and not 1 <= self.mean < self.cap:
            raise InvalidField("workload.mean", self.mean, f"must be in [1, cap = {self.cap})")
        if not 0 <= self.dispatch < MAX_IDLE_SECONDS:
            raise InvalidField("workload.dispatch", self.dispatch, f"must be in [0, {MAX_IDLE_SECONDS:g})")
        if not 0 < self.sigma < 10:
            raise InvalidField("workload.sigma", self.sigma, "must be in (0, 10)")
        self._check_turns()
        if any(not 1 <= length <= self.cap for group in self.lengths for length in group):
            raise InvalidField("workload.lengths", "...", f"must be in [1, cap = {self.cap}]")
        if not self.capacity.holds(self._longest, 0):
            least = self.ranks * self.capacity.blocks_for(self._longest, 0) * self.model.block_size
            fix = (
                f"cannot hold one response, prompt + cap = {self._longest}, on each rank: raise it to {least}"
            )
            raise InvalidField("model.kv_tokens", self.model.kv_tokens, fix)

    def _check_turns(self) -> None:
        for name, low, high in (
            ("turns", 1, self.cap),
            ("tool_tokens", 0, self.cap),
            ("tool_seconds", 0, MAX_IDLE_SECONDS),
            ("tool_sigma", 0, 10),
        ):
            if not low <= getattr(self, name) <= high:
                raise InvalidField(f"workload.{name}", getattr(self, name), f"must be in [{low}, {high:g}]")
        if self.turns == 1 and (self.tool_tokens or self.tool_seconds):
            raise InvalidField(
                "workload.turns", self.turns, "tools follow turns: give more than 1, or no tools"
            )

    @property
    def _longest(self) -> int:
        """The most tokens that a prompt and its response may have."""
        return max(self.prompts, default=self.prompt) + self.cap

    @property
    def capacity(self) -> Capacity:
        """An instance's capacity, as the instance would register it at the buffer."""
        return Capacity(
            kv_blocks=self.model.kv_tokens // self.model.block_size,
            block_size=self.model.block_size,
            max_num_seqs=self.model.max_num_seqs,
            max_model_len=self._longest,
            draft_tokens=self.model.draft_tokens,
            parts=self.ranks,
        )

    def draw(self, seed: int) -> list[list[int]]:
        """Return output lengths by group."""
        if self.lengths:
            return [list(group) for group in self.lengths]
        rng = np.random.default_rng(seed)
        shape = (self.groups, self.group_size)
        scores = self.sigma * math.sqrt(self.between) * rng.standard_normal((self.groups, 1))
        scores = scores + self.sigma * math.sqrt(1 - self.between) * rng.standard_normal(shape)
        scores += math.log(OUTLIER) * (rng.random(shape) < self.outliers)
        raw = np.exp(self._middle() + scores)
        drawn: list[list[int]] = np.clip(np.rint(raw), 1, self.cap).astype(int).tolist()
        return drawn

    def _middle(self) -> float:
        low, high = -5.0, math.log(self.cap) + 3 * self.sigma
        for _ in range(60):
            middle = (low + high) / 2
            usual = (1 - self.outliers) * _mean_cut(middle, self.sigma, self.cap)
            if (
                usual + self.outliers * _mean_cut(middle + math.log(OUTLIER), self.sigma, self.cap)
                < self.mean
            ):
                low = middle
            else:
                high = middle
        return low


def _mean_cut(mu: float, sigma: float, cap: int) -> float:
    """Return E[min(X, cap)] of a log-normal X."""
    score = (math.log(cap) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _NORMAL.cdf(score - sigma) + cap * (1 - _NORMAL.cdf(score))


_GPU_READ = 0.6 * 3.35e12
"""Bytes/s that an H800 reads in practice: 60 % of its memory's peak."""
_GPU_COMPUTE = 0.45 * 990e12
"""Operations/s of an H800 in practice in bfloat16: 45 % of its peak."""
_GPU_LINK = 24e9
"""Bytes/s of KV per GPU from the pool: a node of 8 moves 190 GB/s over 8 x 400 Gbit/s."""
_NODE_GPUS = 8


def _h800s(
    gpus: int,
    step: float,
    request: float,
    weights: float,
    active: float,
    kv_bytes: int,
    attention: float,
    share: float,
) -> Model:
    """Return the model of an instance with this many GPUs.

    `weights` in bytes, `active` parameters per token, `attention` operations per row and token of KV; `share`
    of the memory left by the weights is for KV.
    """
    return Model(
        step=step,
        request=request,
        kv=kv_bytes / (gpus * _GPU_READ),
        attend=attention / (gpus * _GPU_COMPUTE),
        row=2 * active / (gpus * _GPU_COMPUTE),
        weights=weights / (gpus * _GPU_READ),
        prefill=2 * active / (gpus * _GPU_COMPUTE),
        pull=kv_bytes / (max(gpus, _NODE_GPUS) * _GPU_LINK),
        kv_tokens=int(share * (gpus * 80e9 - weights) / kv_bytes),
        kv_bytes=kv_bytes,
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "moonlight": lambda: Workload(
        name="moonlight", instances=32, groups=400, group_size=8, cap=65_536, mean=22_386, sigma=0.9,
        node_instances=8,
        model=_h800s(1, 22.7e-3, 87e-6, 32e9, 3e9, 30 * 1024, 27 * 16 * 2 * 1088, 0.5),
    ),
    "qwen2-vl-72b": lambda: Workload(
        name="qwen2-vl-72b", instances=16, groups=600, group_size=16, cap=40_960, mean=7_615, sigma=0.9,
        model=_h800s(8, 44.8e-3, 1e-6, 146e9, 72e9, 320 * 1024, 80 * 64 * 2 * 256, 0.85),
    ),
    "kimi-k2": lambda: Workload(
        name="kimi-k2", instances=8, groups=800, group_size=8, cap=98_304, mean=38_959, sigma=0.8,
        model=_h800s(32, 42.8e-3, 145e-6, 1e12, 32e9, 69 * 1024, 61 * 64 * 2 * 1088, 0.5),
    ),
}  # fmt: skip
"""The paper's iterations (its table 1); only `step` and `request` are fitted, to the baseline's two times.

`attention` is layers x heads x 2 x the numbers that a head multiplies with a token's key and value:
576 + 512 where they are compressed, 128 + 128 otherwise.
"""
