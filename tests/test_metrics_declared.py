"""Documents, dashboard and alerts name the metrics that are declared, and no others.

That the server exports what is declared: ``tests/serving/test_server.py``.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from prefixshield.serving.catalogue import COMMON_LABELS, COUNTERS, GAUGES, UNKNOWN_GROUPS

ROOT = Path(__file__).parents[1]
DECLARED = {"counter": (*COUNTERS.values(), UNKNOWN_GROUPS), "gauge": tuple(GAUGES.values())}
METRICS = {metric.name: metric for metrics in DECLARED.values() for metric in metrics}

RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/prefixshield.json").read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
QUERIES = [rule["expr"] for rule in RULES] + [target["expr"] for target in TARGETS]

#: PromQL's own words that stand without parentheses behind them.
WORDS = {"and", "or", "unless", "on", "ignoring", "by", "without", "offset", "bool", "inf", "nan"}


def names(query):
    """The metrics and the labels that a PromQL query names."""
    query = re.sub(r'"(?:[^"\\]|\\.)*"', '""', query)
    labels = set(re.findall(r"(\w+)\s*[=!]~?", query))
    query = re.sub(r"\{.*?\}|\[.*?\]|\boffset\s+\w+", " ", query)
    for grouped in re.findall(r"\b(?:on|by|ignoring|without)\s*\((.*?)\)", query):
        labels |= {label.strip() for label in grouped.split(",")}
    query = re.sub(r"\b(?:on|by|ignoring|without)\s*\(.*?\)", " ", query)
    words = re.findall(r"(?<![\w:$])([A-Za-z_:][\w:]*)(?!\w*\s*\()", query)
    return {word for word in words if word not in WORDS}, labels


def test_names_are_read_out_of_promql():
    query = 'sum by (a, b) (rate(x_total{c=~"y_z"}[5m] offset 1h)) / on (d) y:z > 0.5 unless w'
    assert names(query) == ({"x_total", "y:z", "w"}, {"a", "b", "c", "d"})


@pytest.mark.parametrize("query", QUERIES)
def test_queries_name_declared_metrics_and_their_labels(query):
    metrics, labels = names(query)
    assert metrics
    assert metrics <= METRICS.keys()
    known = {label for name in metrics for label in METRICS[name].labels}
    assert labels <= {*known, *COMMON_LABELS, "instance"}


def test_texts_name_labels_of_their_queries():
    texts = [(rule["expr"], str(rule["annotations"])) for rule in RULES]
    texts += [(target["expr"], target["legendFormat"]) for target in TARGETS]
    for query, text in texts:
        used = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
        metrics, _ = names(query)
        assert used <= {*COMMON_LABELS, *(n for name in metrics for n in METRICS[name].labels)}


def test_every_metric_stands_on_the_dashboard():
    assert set().union(*(names(target["expr"])[0] for target in TARGETS)) == METRICS.keys()


def test_variables_of_the_dashboard_ask_for_a_declared_metric():
    queries = [one["definition"] for one in DASHBOARD["templating"]["list"] if "definition" in one]
    assert queries
    for query in queries:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
        assert label in (*COMMON_LABELS, *METRICS[metric].labels)


def test_the_reference_lists_every_metric_as_declared():
    text = (ROOT / "docs/metrics.md").read_text()
    rows = {
        f"| `{metric.name}` | {kind} | {' '.join(f'`{n}`' for n in metric.labels) or '-'} "
        f"| {metric.unit} | {metric.definition} |"
        for kind, metrics in DECLARED.items()
        for metric in metrics
    }
    assert {line for line in text.splitlines() if line.startswith("| `")} == rows


def test_documents_name_declared_metrics_only():
    for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")):
        found = set(re.findall(r"\bprefixshield_\w+", path.read_text()))
        others = {"prefixshield_prefix_id"}  # in a request
        assert found - others <= METRICS.keys(), path.name


def test_every_alert_is_explained():
    text = (ROOT / "docs/operators.md").read_text()
    rows = re.findall(r"^\| `(PrefixShield\w+)` \| .+ \| .+ \|$", text, re.MULTILINE)
    assert sorted(rows) == sorted(rule["alert"] for rule in RULES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_alerts_fire_when_they_should():
    """Prometheus' own evaluation of made-up series: an attack, one elsewhere, a failure."""
    command = ["promtool", "test", "rules", str(ROOT / "deploy/alerts_test.yml")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
