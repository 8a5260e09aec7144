"""The files of ops/ fit each other, the code and the documents; tests/process/test_prometheus.py runs them."""

import json
import re

from ops_files import OPS, REPO, dashboard
from statuses import status

from seer.common.wire import ServiceStatus
from seer.observe.metrics import families
from seer.observe.observer import Seen

DOCUMENT = (REPO / "docs" / "operations.md").read_text()
SERVICES = {
    "dgds": ServiceStatus(figures={"tokens": 5, "groups": 2, "evicted": 1, "gaps": 0}),
    "context": ServiceStatus(figures={"error": 0.3, "bias": -0.1}),
}


def names():
    """All names that a scrape can have."""
    found = set()
    for family in families(Seen(status=status(), services=SERVICES)):
        found |= {sample.name for sample in family.samples}
    return found


def test_the_dashboard_is_what_its_table_makes():
    made = dashboard().module.dashboard()
    assert json.loads((OPS / "dashboard.json").read_text()) == made, (
        "python ops/dashboard.py > ops/dashboard.json"
    )
    ids = [panel["id"] for panel in made["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in made["panels"]]
    assert len(set(places)) == len(places), "no panel covers another"
    panels = [each for each in made["panels"] if each["type"] == "timeseries"]
    assert all(each["targets"] and each["fieldConfig"]["defaults"]["unit"] for each in panels)


def test_rules_and_panels_speak_of_metrics_that_exist():
    rules = (OPS / "alerts.yml").read_text()
    used = dashboard().metrics() | set(re.findall(r"\bseer_\w+", rules))
    assert used
    assert used <= names(), used - names()
    tested = (OPS / "alerts_test.yml").read_text()
    for alert in re.findall(r"alert: (\w+)", rules):
        assert f"| {alert}" in DOCUMENT, "what to do?"
        assert re.search(rf"alertname: {alert}, exp_alerts: \[{{", tested), f"{alert} is never seen to fire"
        assert f"alertname: {alert}, exp_alerts: []" in tested, f"{alert} is never seen to be silent"


def test_every_metric_is_in_the_documents():
    endings = re.findall(r"`(_\w+)`", DOCUMENT)
    whole = set(re.findall(r"\bseer_\w+", DOCUMENT))
    for name in names():
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert base in whole or any(base.endswith(each) for each in endings), base
    invented = {
        each for each in whole if each not in {re.sub(r"_(bucket|sum|count)$", "", n) for n in names()}
    }
    assert not invented, invented
