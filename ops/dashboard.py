"""The dashboard's panels, in the order in which operators ask, and the Grafana file that is made of them.

    python ops/dashboard.py > ops/dashboard.json

Tests compare the file with the table, have promtool check every expression, and look for every metric in a
real scrape. `bench/services/dashboard.py` draws the same panels from scraped data.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

RATE = "$__rate_interval"
"""Grafana's: at least four scrapes."""

ONE = 'job="$job", instance="$instance"'
"""The exporter that is looked at; one for each system."""

DRAFT, PROMPT, BLOCKS = "seer_engine_draft", "seer_engine_prompt_tokens", "seer_engine_kv_blocks"
"""How names of metrics begin."""

COLUMNS, WIDTH, HEIGHT = 2, 12, 8
"""Grafana's grid is 24 wide."""


class Line(NamedTuple):
    """An expression, and how each of its series is called."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """A picture with its unit, in Grafana's words, e.g. `s`, `percentunit`, `short`."""

    title: str
    unit: str
    lines: tuple[Line, ...]


class Row(NamedTuple):
    """A question of the operators, and the panels that answer it."""

    title: str
    panels: tuple[Panel, ...]


def rate(metric: str, more: str = "") -> str:
    """Return the expression for a counter's rate per second."""
    return f"rate({metric}{{{ONE}{more}}}[{RATE}])"


def gauge(metric: str, more: str = "") -> str:
    """Return the expression for a gauge."""
    return f"{metric}{{{ONE}{more}}}"


def quantile(share: float, metric: str, by: str = "") -> str:
    """Return the expression for a quantile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) ({rate(f'{metric}_bucket')}))"


def share(part: str, whole: str) -> str:
    """Return the expression for the quotient of two counters' rates, over all engines."""
    return f"sum({rate(part)}) / sum({rate(whole)})"


ROWS = (
    Row("Does it move?", (
        Panel("Tokens/s", "short", (
            Line(f"sum({rate('seer_engine_tokens_total')})", "generated"),
            Line(f"sum({rate('seer_engine_ahead_tokens_total')})", "of these, ahead"),
            Line(rate("seer_tokens_total"), "kept, as chunks end"),
        )),
        Panel("Requests", "short", (Line(gauge("seer_requests"), "{{state}}"),)),
    )),
    Row("When does it end?", (
        Panel("Expected time to the end", "s", (Line(gauge("seer_eta_seconds"), "ETA"),)),
        Panel("Groups and rollouts", "short", (
            Line(gauge("seer_groups_open"), "open groups"),
            Line(gauge("seer_rollouts"), "rollouts"),
        )),
    )),
    Row("What holds up the tail?", (
        Panel("Chunks: median and 90 %", "s", (
            Line(quantile(0.5, "seer_chunk_seconds"), "run, median"),
            Line(quantile(0.9, "seer_chunk_seconds"), "run, 90 %"),
            Line(quantile(0.5, "seer_chunk_wait_seconds"), "wait, median"),
            Line(quantile(0.9, "seer_chunk_wait_seconds"), "wait, 90 %"),
        )),
        Panel("Response tokens", "short", (
            Line(quantile(0.5, "seer_response_tokens"), "median"),
            Line(quantile(0.99, "seer_response_tokens"), "99 %"),
        )),
        Panel("Requests by engine", "short", (
            Line(gauge("seer_engine_requests", ', state="running"'), "{{engine}}"),
        )),
        Panel("Ended requests/s", "short", (Line(rate("seer_requests_finished_total"), "{{reason}}"),)),
    )),
    Row("Did an engine go?", (
        Panel("Engines", "short", (Line(gauge("seer_engines"), "{{state}}"),)),
        Panel("Lost chunks and restarts, in an hour", "short", (
            Line(f"increase(seer_chunks_lost_total{{{ONE}}}[1h])", "lost chunks"),
            Line(f"sum(increase(seer_engine_restarts_total{{{ONE}}}[1h]))", "restarts"),
        )),
        Panel("KV blocks in use", "percentunit", (
            Line(f"1 - {gauge(f'{BLOCKS}_free')} / {gauge(BLOCKS)}", "{{engine}}"),
        )),
        Panel("Preemptions/s", "short", (Line(rate("seer_engine_preemptions_total"), "{{engine}}"),)),
    )),
    Row("Are drafts and the pool worth it?", (
        Panel("Tokens per step and request", "short", (
            Line(f"1 + {share(f'{DRAFT}_accepted_tokens_total', f'{DRAFT}_verifications_total')}", "tokens"),
        )),
        Panel("Share of step time spent drafting", "percentunit", (
            Line(share("seer_engine_draft_seconds_total", "seer_engine_step_seconds_total"), "drafting"),
        )),
        Panel("Prompt tokens that were not computed", "percentunit", (
            Line(share(f"{PROMPT}_cached_total", f"{PROMPT}_total"), "all"),
            Line(share(f"{PROMPT}_pool_total", f"{PROMPT}_total"), "from the pool"),
        )),
        Panel("KV pool: failures and damaged blocks/s", "short", (
            Line(f"sum({rate('seer_engine_pool_failures_total')})", "failures"),
            Line(f"sum({rate('seer_engine_pool_corrupt_blocks_total')})", "damaged"),
            Line(f"sum({rate('seer_engine_pool_dropped_blocks_total')})", "not saved"),
        )),
    )),
    Row("Was it fast?", (
        Panel("Last rollout", "s", (
            Line(gauge("seer_rollout_seconds"), "all"),
            Line(gauge("seer_rollout_tail_seconds"), "tail"),
        )),
        Panel("Share of what is possible", "percentunit", (
            Line(gauge("seer_rollout_efficiency_ratio"), "last rollout"),
        )),
        Panel("Weight updates: median by phase", "s", (
            Line(quantile(0.5, "seer_weight_update_seconds", "phase"), "{{phase}}"),
        )),
        Panel("Trainer's logprobs off the engines'", "short", (
            Line(gauge("seer_mismatch_kl"), "KL"), Line(gauge("seer_mismatch_mean"), "mean"),
            Line(gauge("seer_mismatch_max"), "largest"),
        )),
        Panel("Length estimates: error and bias, in natural log", "short", (
            Line(gauge("seer_context_error_ratio"), "error"),
            Line(gauge("seer_context_bias_ratio"), "bias"),
        )),
    )),
    Row("Is Seer itself well?", (
        Panel("Event loop: largest lag in a minute", "s", (Line(gauge("seer_loop_lag_seconds"), "lag"),)),
        Panel("Dropped messages/s", "short", (Line(rate("seer_messages_total"), "{{socket}} {{kind}}"),)),
        Panel("dgds: tokens", "short", (Line(gauge("seer_dgds_tokens"), "{{shard}}"),)),
        Panel("Results that nobody fetched yet", "bytes", (Line(gauge("seer_results_held_bytes"), "bytes"),)),
    )),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return Grafana's JSON model, of a version that Grafana 9 and later read."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1},
                "panels": [],
            }
        )
        top += 1
        for number, panel in enumerate(row.panels):
            place = {"x": number % COLUMNS * WIDTH, "y": top + number // COLUMNS * HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place | {"w": WIDTH, "h": HEIGHT}))
        top += -(-len(row.panels) // COLUMNS) * HEIGHT
    return {
        "uid": "seer-rollout",
        "title": "Seer",
        "tags": ["seer"],
        "schemaVersion": 38,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), *_labels()]},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "gridPos": place,
        "datasource": source,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **({} if "bias" in panel.title else {"min": 0})},
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": each.expr, "legendFormat": each.legend}
            for i, each in enumerate(panel.lines)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _labels() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "query": {"query": f"label_values({of}, {name})", "refId": name},
            "refresh": 2,
        }
        for name, of in (("job", "seer_up"), ("instance", 'seer_up{job="$job"}'))
    ]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n")
