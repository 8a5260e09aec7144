"""What is seen of a system as metrics: names, types and labels. docs/operations.md tells how to use them.

Invariants (tests/unit/test_metrics.py):
- names begin with `seer_`, have base units, and counters end in `_total`;
- labels have values of fixed sets, or are names of engines that are registered, or of dgds shards: never
  anything of a request, group, rollout or trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from seer.common.wire import Histogram, Status
from seer.observe.observer import Seen

Labels = tuple[str, ...]
Values = Mapping[Labels, float]


class Row(NamedTuple):
    """A metric and where its value is: a path of attributes and keys. A counter's name ends in `_total`."""

    name: str
    path: str
    help: str


SYSTEM = (
    Row("seer_uptime_seconds", "uptime_seconds", "Since the buffer started."),
    Row("seer_weight_version", "weight_version", "Version of the live weights."),
    Row("seer_asleep", "asleep", "1 while engines sleep for a trainer."),
    Row("seer_draining", "draining", "1 while the buffer finishes what it began, and begins nothing."),
    Row("seer_rollouts", "rollouts", "Rollouts that the buffer has."),
    Row("seer_groups_open", "groups_open", "Groups whose responses are generated."),
    Row("seer_results_held_bytes", "results_held_bytes", "Finished groups that no trainer has acknowledged."),
    Row("seer_eta_seconds", "eta_seconds", "Expected time to the end of all open work; absent: unknown."),
    Row("seer_rollout_seconds", "last_rollout.seconds", "Time that the last rollout took."),
    Row("seer_rollout_tail_seconds", "last_rollout.tail_seconds", "Of that, for the last tenth to finish."),
    Row("seer_rollout_efficiency_ratio", "last_rollout.efficiency", "Least possible time, over that."),
    Row("seer_mismatch_kl", "mismatch.kl", "KL from engines to trainer, nats a token, as a trainer told."),
    Row("seer_mismatch_mean", "mismatch.mean", "Mean size of trainer - engine, in logprobs."),
    Row("seer_mismatch_max", "mismatch.largest", "Largest of them."),
    Row("seer_loop_lag_seconds", "loop_lag_seconds", "How late the event loop was at most in a minute."),
    Row("seer_tokens_total", "counters.tokens", "Output tokens kept."),
    Row("seer_chunks_total", "counters.chunks", "Chunks dispatched."),
    Row("seer_migrations_total", "counters.migrations", "Chunks elsewhere than the one before."),
    Row("seer_chunks_lost_total", "counters.lost", "Chunks that ran for nothing."),
    Row("seer_prompts_refused_total", "counters.refused", "Prompts that were refused, failed or cancelled."),
    Row("seer_groups_expired_total", "counters.expired", "Finished groups that nobody fetched in time."),
    Row("seer_later_turns_total", "counters.later_turns", "Prompts of sessions that went on from another."),
    Row("seer_segments_total", "counters.segments", "Prompts of sessions with a rewritten history."),
)

ENGINE = (
    Row("seer_engine_kv_blocks", "capacity.kv_blocks", "KV blocks that requests can use."),
    Row("seer_engine_kv_blocks_free", "stats.free_blocks", "Free ones, cached ones included."),
    Row("seer_engine_kv_blocks_reserved", "reserved_blocks", "Booked for the worst case of what runs."),
    Row("seer_engine_kv_blocks_pinned", "stats.pinned_blocks", "Held by saves to the KV pool."),
    Row("seer_engine_pool_away", "stats.pool_away", "1 while the KV pool is not used after failures."),
    Row("seer_engine_restarts_total", "restarts", "Starts after the first."),
    Row("seer_engine_tokens_total", "stats.generated_tokens", "Generated tokens."),
    Row("seer_engine_ahead_tokens_total", "stats.ahead_tokens", "Of these, for coming submissions' drafts."),
    Row("seer_engine_prompt_tokens_total", "stats.prompt_tokens", "Prompt tokens."),
    Row("seer_engine_prompt_tokens_cached_total", "stats.cached_tokens", "Those that were not computed."),
    Row("seer_engine_prompt_tokens_pool_total", "stats.pool_tokens", "Of these, from the KV pool."),
    Row("seer_engine_steps_total", "stats.steps", "Steps."),
    Row("seer_engine_step_seconds_total", "stats.step_seconds", "Time in steps."),
    Row("seer_engine_draft_seconds_total", "stats.draft_seconds", "Of that, for drafts."),
    Row("seer_engine_preemptions_total", "stats.preemptions", "Requests that vLLM preempted."),
    Row("seer_engine_draft_tokens_total", "stats.drafted_tokens", "Drafted tokens."),
    Row("seer_engine_draft_accepted_tokens_total", "stats.accepted_tokens", "Those that were accepted."),
    Row("seer_engine_draft_verifications_total", "stats.verifications", "Steps of requests."),
    Row("seer_engine_draft_head_behind", "stats.head_behind", "Updates since the draft head's weights."),
    Row("seer_engine_pool_failures_total", "stats.pool_failures", "Calls into the KV pool that failed."),
    Row("seer_engine_pool_corrupt_blocks_total", "stats.pool_corrupt", "Blocks with a wrong checksum."),
    Row("seer_engine_pool_saved_blocks_total", "stats.pool_saved_blocks", "Blocks saved to the KV pool."),
    Row("seer_engine_pool_dropped_blocks_total", "stats.pool_dropped_blocks", "Blocks not saved in time."),
    Row("seer_engine_dummy_steps_total", "stats.dummy_steps", "Of data-parallel ranks, without a request."),
    Row("seer_engine_encoder_runs_total", "stats.encoder_runs", "Images that the vision encoder computed."),
)

HISTOGRAMS = (
    Row("seer_response_tokens", "response_tokens", "Tokens of finished responses, or turns."),
    Row("seer_chunk_seconds", "chunk_seconds", "From the dispatch of a chunk to its end."),
    Row("seer_chunk_wait_seconds", "chunk_wait_seconds", "Before the dispatch of a request's next chunk."),
)

DGDS = (
    Row("seer_dgds_tokens", "figures.tokens", "Tokens held, overheads included."),
    Row("seer_dgds_groups", "figures.groups", "Groups held."),
    Row("seer_dgds_evicted_total", "figures.evicted", "Groups dropped for want of room."),
    Row("seer_dgds_gaps_total", "figures.gaps", "Appends that an engine had to repeat."),
)

CONTEXT = (
    Row("seer_context_error_ratio", "figures.error", "Mean |ln(length / estimate)| since its start."),
    Row("seer_context_bias_ratio", "figures.bias", "Mean ln(length / estimate) since its start."),
)

PHASES = "weight_update_seconds_"
"""Begins the names of histograms of one phase."""

KINDS = {
    "malformed": "malformed",
    "strangers": "stranger",
    "refused": "refused",
    "undeliverable": "undeliverable",
}
"""Labels of a socket's counters."""


def families(seen: Seen | None) -> Iterator[Metric]:
    """Yield all metrics; None: the buffer did not answer."""
    yield GaugeMetricFamily("seer_up", "1 if the buffer answered in time.", value=float(seen is not None))
    if seen is None:
        return
    status = seen.status
    build: Values = {(status.version, status.policy): 1.0}
    yield _family("seer_build_info", "Version and policy of the buffer.", ("version", "policy"), build)
    yield from _families(SYSTEM, (), {(): status})
    yield from _by_label(status)
    yield from _families(ENGINE, ("engine",), {(each.name,): each for each in status.instances})
    yield from _of_engines(status)
    yield from _histograms(status.histograms)
    shards = {name: each for name, each in seen.services.items() if name.startswith("dgds")}
    dgds: dict[Labels, object] = {(name,): each for name, each in shards.items()}
    yield from _families(DGDS, ("shard",), dgds)
    if context := seen.services.get("context"):
        yield from _families(CONTEXT, (), {(): context})


def value_at(item: object, path: str) -> float | None:
    """Return a number by its path; None: unknown."""
    found: Any = item
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name)
        if found is None:
            return None
    return float(found)


def _families(rows: Sequence[Row], labels: Labels, items: Mapping[Labels, object]) -> Iterator[Metric]:
    for row in rows:
        values = {key: value_at(item, row.path) for key, item in items.items()}
        known = {key: value for key, value in values.items() if value is not None}
        if known:
            yield _family(row.name, row.help, labels, known)


def _family(name: str, text: str, labels: Labels, values: Values) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _by_label(status: Status) -> Iterator[Metric]:
    serving, quarantined = len(status.instances), len(status.quarantined)
    asleep = max(0, status.engines - serving - status.loading - quarantined)
    engines = {"serving": serving, "loading": status.loading, "asleep": asleep, "quarantined": quarantined}
    yield _family("seer_engines", "Registered engines.", ("state",), _keyed(engines))
    requests = {"waiting": status.requests_waiting, "running": status.requests_running}
    requests["held"] = status.requests_held
    yield _family("seer_requests", "Unfinished requests.", ("state",), _keyed(requests))
    failing = {part: float(part in status.unwritten) for part in ("log", "chunks")}
    yield _family("seer_log_failing", "1 while it cannot be written.", ("part",), _keyed(failing))
    ended = _keyed(status.finished)
    yield _family("seer_requests_finished_total", "Requests that ended.", ("reason",), ended)
    messages: Values = {
        (socket, KINDS[kind]): float(count)
        for socket, counts in status.messages.items()
        for kind, count in counts.items()
        if kind in KINDS
    }
    yield _family("seer_messages_total", "Messages dropped, by socket.", ("socket", "kind"), messages)


def _keyed(values: Mapping[str, float]) -> dict[Labels, float]:
    return {(key,): float(value) for key, value in values.items()}


def _of_engines(status: Status) -> Iterator[Metric]:
    states: Values = {
        (each.name, state): float(count)
        for each in status.instances
        for state, count in (("running", each.stats.running), ("waiting", each.stats.waiting))
    }
    yield _family("seer_engine_requests", "Requests that the engine has.", ("engine", "state"), states)
    lost: Values = {(each.name,): float(status.lost_chunks.get(each.name, 0)) for each in status.instances}
    text = "Chunks that ran for nothing at this engine."
    yield _family("seer_engine_chunks_lost_total", text, ("engine",), lost)


def _histograms(histograms: Mapping[str, Histogram]) -> Iterator[Metric]:
    for row in HISTOGRAMS:
        if row.path in histograms:
            family = HistogramMetricFamily(row.name, row.help)
            family.add_metric((), *_buckets(histograms[row.path]))
            yield family
    text = "Phases of weight updates."
    family = HistogramMetricFamily("seer_weight_update_seconds", text, labels=("phase",))
    for key, histogram in histograms.items():
        if key.startswith(PHASES):
            family.add_metric((key.removeprefix(PHASES),), *_buckets(histogram))
    yield family


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True)), histogram.total
