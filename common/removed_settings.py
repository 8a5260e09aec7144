"""Settings that there were once, and what to do instead: a file that still has one is refused with that."""

from __future__ import annotations

REMOVED = {
    "buffer.max_attempts": "leave it out: a chunk has 8 attempts",
    "context.publish_interval_seconds": "leave it out: estimates are published after 0.05 s",
    "dgds.ttl_seconds": "leave it out: groups are kept for 600 s after their last use",
    "engine.fault_position": "leave it out: `seer verify --plant-fault` plants a fault by itself",
    "engine.flush_seconds": "leave it out: tokens go to the dgds within 0.05 s",
    "engine.flush_tokens": "leave it out: 64 new tokens of a request go to the dgds at once",
    "engine.replay_mean_tokens": "write mean_tokens under [engine.replay]",
    "engine.replay_row_seconds": "write row_seconds under [engine.replay]",
    "engine.replay_step_seconds": "write step_seconds under [engine.replay]",
    "engine.replay_trace": "write trace under [engine.replay]",
    "engine.replay_vocab_size": "write vocab_size under [engine.replay]",
    "engine.status_seconds": "leave it out: engines report every second",
    "gateway.update_seconds": "set buffer.update_seconds, which gateways read, too",
    "pool.call_seconds": "leave it out: a call into the pool that takes longer than 2 s is a miss",
}
"""By the names that files have."""
