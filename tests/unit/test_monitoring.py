"""Alert rules, dashboard and runbook: they name what exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from coordinator.front import FrontConfig
from coordinator.part_series import CertificateSeries
from tests.scripted_decoder import ScriptedDecoder, http_client

DEPLOY = Path(__file__).parents[2] / "deploy"
RUNBOOK = DEPLOY.parent / "docs" / "runbook.md"
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/outrider.json").read_text())
SERIES = re.compile(r"outrider:\w+")


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


async def test_every_series_that_is_asked_for_is_exported() -> None:
    """Guards against an alert that can never fire and a panel that stays empty."""
    async with http_client(ScriptedDecoder(), FrontConfig()) as client:
        families = text_string_to_metric_families((await client.get("/metrics")).text)
        exported = {sample.name for family in families for sample in family.samples}
    exported |= {family.name for family in CertificateSeries([]).collect()}
    named = {name for expr in [*queries(), *(rule["expr"] for rule in RULES)] for name in SERIES.findall(expr)}
    assert len(named) > 15
    assert named <= exported


def test_every_alert_has_a_section_of_the_runbook() -> None:
    """Guards the operator who is woken by one."""
    sections = set(re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE))
    assert sections == {rule["alert"] for rule in RULES}
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_every_alert_is_tried_out() -> None:
    """Guards against a rule without a case in which it fires."""
    cases = yaml.safe_load((DEPLOY / "prometheus/alerts.test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in RULES}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "command",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts.test.yml")],
)
def test_promtool_accepts_and_tries_the_rules(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_one_that_grafana_provisions() -> None:
    """Guards the links between provisioning, data source and panels, which fail in silence."""
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["description"] for panel in DASHBOARD["panels"])
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/outrider.yml").read_text())["providers"][0]
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())["services"]["grafana"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in compose["volumes"]
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, place["y"]) for x in range(place["x"], place["x"] + place["w"])}
        assert not cells & taken
        taken |= cells
