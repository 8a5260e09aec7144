"""A buffer's `Status`, made up: for screens, metrics, and figures about large systems."""

from seer.common.types import Capacity, InstanceStats
from seer.common.wire import (
    Histogram,
    InstanceStatus,
    Mismatch,
    OpenRequest,
    RolloutEnd,
    RolloutStatus,
    Status,
)

COUNTERS = "chunks", "migrations", "lost", "tokens", "refused", "expired", "later_turns", "segments"


def engine(number, tokens=0, **stats):
    known = {
        "running": 16, "free_blocks": 840, "generated_tokens": 10_000 + tokens, "verifications": 5_000 + tokens // 2,
        "accepted_tokens": 4_200 + tokens // 2, "prompt_tokens": 1_000, "cached_tokens": 620, "steps": 700,
    }  # fmt: skip
    return InstanceStatus(
        name=f"node{number}-0",
        capacity=Capacity(kv_blocks=1000, block_size=16, max_num_seqs=64, max_model_len=4096),
        stats=InstanceStats(**known | stats),
        chunks=16,
        reserved_blocks=350,
    )


def status(count=4, tokens=0, **fields):
    histogram = Histogram([1.0, 10.0], [3, 2, 1], 31.5)
    updates = {f"weight_update_seconds_{phase}": histogram for phase in ("check", "drain", "load")}
    known = {
        "name": "buffer", "incarnation": 1, "policy": "seer", "version": "0.2.0",
        "instances": [engine(number, tokens) for number in range(count)], "engines": count,
        "rollouts": 1, "requests_waiting": 107, "requests_running": 64, "weight_version": 12,
        "uptime_seconds": 3720.0, "groups_open": 24, "results_held_bytes": 4096, "eta_seconds": 110.0,
        "counters": dict.fromkeys(COUNTERS, 7),
        "open_rollouts": [
            RolloutStatus(
                rollout_id="step-12", requests=192, finished=141, tokens=51_000, groups_open=24, seconds=300.0,
                eta_seconds=110.0, generated=53_100,
            )
        ],
        "longest_open": [
            OpenRequest(
                rollout_id="step-12", prompt_id="p18", index=3, generated=1310, expected=1420.0, engine="node0-1",
                chunks=4, open=5, running=3,
            )
        ],
        "lost_chunks": {"node1-0": 3}, "finished": {"stop": 140, "length": 1, "failed": 0, "cancelled": 0},
        "histograms": {
            "response_tokens": histogram, "chunk_seconds": histogram, "chunk_wait_seconds": histogram, **updates,
        },
        "messages": {"trainers": dict.fromkeys(("malformed", "strangers", "refused", "undeliverable"), 2)},
        "loop_lag_seconds": 0.004,
        "last_rollout": RolloutEnd(
            seconds=300.0, tail_seconds=60.0, requests=192, tokens=90_000, longest=1800, efficiency=0.8
        ),
        "mismatch": Mismatch(tokens=90_000, mean=0.002, largest=0.4, kl=2e-5, weight_version=12),
    }  # fmt: skip
    return Status(**known | fields)
