"""What deploy/monitoring promises: each metric that it names exists, the alerts come when they should, Prometheus and
OpenMetrics' readers take what a node prints.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.node.config import NodeConfig
from swarmnode.protocols.metrics import GAUGE, Metrics
from swarmnode.training.options import describe

ROOT = Path(__file__).resolve().parent.parent
MONITORING = ROOT / "deploy" / "monitoring"
sys.path.insert(0, str(ROOT / "docs"))

import generate  # noqa: E402 (found in the folder above)

NODE = 'instance="127.0.0.1:4078", job="swarmnode"'
RULES: dict[str, Any] = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))
PROMETHEUS: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on this machine")

# Of each alert: series that set it off after an hour, a minute a value, as promtool writes them.
ILL = {
    "SwarmnodeDown": {f"up{{{NODE}}}": "0x60"},
    "SwarmnodeNoPeers": {f"swarmnode_peers{{{NODE}}}": "0x60"},
    "SwarmnodeProblems": {f'swarmnode_warnings{{{NODE}, kind="problem"}}': "2x60"},
    "SwarmnodeDisk": {f"swarmnode_disk_free_bytes{{{NODE}}}": "1e9x60"},
    "SwarmnodeTrainerRestarts": {f"swarmnode_trainer_restarts_total{{{NODE}}}": "0+1x60"},
    "SwarmnodeClock": {f"swarmnode_clock_behind_seconds{{{NODE}}}": "-25x60"},
}
WELL = {
    f"up{{{NODE}}}": "1x60",
    f"swarmnode_round_age_seconds{{{NODE}}}": "0+60x60",  # its rounds may be as long; `health` knows how long they are
    f"swarmnode_peers{{{NODE}}}": "3x60",
    f'swarmnode_warnings{{{NODE}, kind="problem"}}': "0x60",
    f'swarmnode_warnings{{{NODE}, kind="notice"}}': "1x60",
    f"swarmnode_disk_free_bytes{{{NODE}}}": "9e9x60",
    f"swarmnode_trainer_restarts_total{{{NODE}}}": "2x60",
    f"swarmnode_loss{{{NODE}}}": "2.5x60",
    f"swarmnode_clock_behind_seconds{{{NODE}}}": "1x60",
}


def promtool(*arguments: str | Path, stdin: str = "") -> str:
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def page() -> str:
    """What a node with a value of every metric prints."""
    metrics = Metrics()
    for metric in generate.declared():
        metrics.show(metric, lambda labelled=metric.label: {'a "b"\\': 1.5, "c": 0.0} if labelled else 12.0)
    return metrics.text()


def used_in(text: str) -> set[str]:
    return set(re.findall(r"\bswarmnode_[a-z_]+", text))


def test_alerts_and_panels_name_metrics_that_exist() -> None:
    known = {metric.name for metric in generate.declared()}
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    asked = {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}
    asked |= {variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"}
    assert len(asked) > 12 and all(used_in(expression) for expression in asked)
    rules = {rule["expr"] for group in RULES["groups"] for rule in group["rules"]}
    for expression in asked | rules - {'up{job="swarmnode"} == 0'}:
        assert used_in(expression) and used_in(expression) <= known, expression


def test_panels_have_places_of_their_own() -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    covered = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(covered) == len(set(covered)) and all(x < 24 for x, _ in covered)
    assert len({panel["id"] for panel in panels}) == len(panels)


@needs_promtool
def test_prometheus_understands_its_settings(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    text = (MONITORING / "prometheus.yml").read_text(encoding="utf-8")
    assert "/var/lib/swarmnode/dashboard.token" in text
    (tmp_path / "prometheus.yml").write_text(text.replace("/var/lib/swarmnode/dashboard.token", str(token)))
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    assert f"{len(ILL)} rules found" in promtool("check", "config", tmp_path / "prometheus.yml")


@needs_promtool
def test_each_alert_comes_when_something_is_wrong_and_none_where_all_is_well(tmp_path: Path) -> None:
    rules = {rule["alert"] for group in RULES["groups"] for rule in group["rules"]}
    assert rules == ILL.keys()
    cases = [(series, {alert}) for alert, series in ILL.items()] + [(WELL, set[str]())]
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "1h",
                    "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(expected)],
                }
            ],
        }
        for series, expected in cases
    ]
    (tmp_path / "tests.yml").write_text(
        yaml.safe_dump({"rule_files": [str(MONITORING / "alerts.yml")], "tests": tests})
    )
    promtool("test", "rules", tmp_path / "tests.yml")


@needs_promtool
def test_promtool_finds_nothing_wrong_with_what_a_node_prints() -> None:
    assert promtool("check", "metrics", stdin=page()).strip() == ""


def test_both_readers_take_what_a_node_prints() -> None:
    declared = generate.declared()
    assert len(list(text_string_to_metric_families(page()))) == len(declared)
    # OpenMetrics has the same samples; it names a counter without its end, and has a last line.
    text = re.sub(r"^(# (?:HELP|TYPE) \S+)_total ", r"\1 ", page(), flags=re.MULTILINE) + "# EOF\n"
    families = list(openmetrics.text_string_to_metric_families(text))
    assert {family.name for family in families} == {metric.name.removesuffix("_total") for metric in declared}
    assert {family.type for family in families if family.name == "swarmnode_info"} <= {GAUGE}


def test_the_scraped_address_is_the_page_of_a_node_by_default() -> None:
    [job] = PROMETHEUS["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    assert target == describe(NodeConfig)["dashboard"][0].default
