"""Names, types and labels of all metrics."""

import re

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from statuses import status

from seer.common.wire import ServiceStatus, Unwritten
from seer.observe.metrics import families
from seer.observe.observer import Seen

LABELS = {
    "engine": r"node\d+-0",
    "shard": r"dgds(-\d+)?",
    "state": "serving|loading|asleep|quarantined|waiting|running|held",
    "reason": "stop|length|failed|cancelled",
    "phase": "check|drain|load",
    "socket": "trainers|engines|events",
    "kind": "malformed|stranger|refused|undeliverable",
    "version": r"\d+\.\d+\.\d+",
    "policy": "seer",
    "part": "log|chunks",
    "le": r"[\d.e+]+|\+Inf",
}
"""All labels, and their values: none names a request, group, rollout or trainer."""

SEEN = Seen(
    status=status(unwritten={"log": Unwritten(seconds=200.0, problem="No space left")}),
    services={
        "dgds-0": ServiceStatus(figures={"tokens": 5, "groups": 2, "evicted": 1, "gaps": 0}),
        "dgds-1": ServiceStatus(figures={"tokens": 6}),
        "context": ServiceStatus(figures={"error": 0.3, "bias": -0.1}),
    },
)


def parsed(seen):
    class Collector:
        def collect(self):
            return families(seen)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    return {each.name: each for each in text_string_to_metric_families(generate_latest(registry).decode())}


def test_names_types_and_labels_are_those_of_the_documents():
    found = parsed(SEEN)
    assert len(found) > 50
    for name, family in found.items():
        assert re.fullmatch(r"seer(_[a-z0-9]+)+", name)
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent)(_|$)", name), "base units"
        assert family.type in ("gauge", "counter", "histogram")
        assert family.documentation
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total")
            for label, value in sample.labels.items():
                assert re.fullmatch(LABELS[label], value), (name, label, value)


def test_values_are_those_of_the_status():
    found = parsed(SEEN)

    def value(name, **labels):
        (sample,) = [
            each
            for family in found.values()
            for each in family.samples
            if (each.name, each.labels) == (name, labels)
        ]
        return sample.value

    assert value("seer_up") == 1
    assert value("seer_eta_seconds") == 110
    assert value("seer_requests", state="waiting") == 107
    assert value("seer_log_failing", part="log") == 1
    assert value("seer_log_failing", part="chunks") == 0
    assert value("seer_engines", state="serving") == 4
    assert value("seer_engine_chunks_lost_total", engine="node1-0") == 3
    assert value("seer_engine_kv_blocks_free", engine="node0-0") == 840
    assert value("seer_chunk_seconds_bucket", le="1.0") == 3
    assert value("seer_chunk_seconds_bucket", le="10.0") == 5
    assert value("seer_chunk_seconds_count") == value("seer_chunk_seconds_bucket", le="+Inf") == 6
    assert value("seer_chunk_seconds_sum") == 31.5
    assert value("seer_dgds_tokens", shard="dgds-1") == 6
    assert value("seer_context_bias_ratio") == -0.1


def test_what_is_unknown_is_left_out():
    found = parsed(
        Seen(status=status(0, eta_seconds=None, last_rollout=None, open_rollouts=[], longest_open=[]))
    )
    assert not {"seer_eta_seconds", "seer_rollout_seconds", "seer_context_error_ratio"} & found.keys()
    assert parsed(None).keys() == {"seer_up"}


def test_names_of_engines_cannot_break_the_text():
    from msgspec.structs import replace
    from statuses import engine

    evil = 'a"\n\\{x="'
    found = parsed(Seen(status=status(instances=[replace(engine(0), name=evil)])))
    assert found["seer_engine_steps"].samples[0].labels == {"engine": evil}
