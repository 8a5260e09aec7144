"""The gateway's counters as Prometheus reads them.

Invariant: each counter of `/server_info` is in the text, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

ENDS = ("completed", "refused", "failed", "cancelled")
"""How requests end: values of the label `outcome`."""

NOW = ("processes", "open_requests", "under_way")
"""Counters of what is there now."""


class _Collector:
    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            "seer_gateway_requests", "HTTP requests that ended, by outcome.", labels=["outcome"]
        )
        for outcome in ENDS:
            ended.add_metric([outcome], self._counts.get(outcome, 0))
        yield ended
        for name, count in self._counts.items():
            if name in NOW:
                yield GaugeMetricFamily(f"seer_gateway_{name}", "There now.", value=count)
            elif name not in ENDS:
                total = "requests_begun" if name == "requests" else name
                yield CounterMetricFamily(f"seer_gateway_{total}", "Since the start.", value=count)


def exposition(counts: Mapping[str, int]) -> bytes:
    """Return the text for a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(counts))
    return generate_latest(registry)
