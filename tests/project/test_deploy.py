"""Deployment files agree with the server and with each other. docs/deployment.md says how they are linted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from skipdecode.cli.arguments import add_options, config_from
from skipdecode.cli.serve import Config

DEPLOY = Path(__file__).parents[2] / "deploy"
HISTOGRAM = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "skipdecode.json").read_text())


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def served_metrics() -> dict[str, set[str]]:
    """Labels of every sample that the server's /metrics can have."""
    pytest.importorskip("prometheus_client")
    from skipdecode.serving.metrics import Metrics

    metrics = Metrics(30)
    found: dict[str, set[str]] = {}
    for value in vars(metrics).values():
        for family in value.collect() if hasattr(value, "collect") and hasattr(value, "_labelnames") else ():
            labels = set(value._labelnames)
            if family.type == "histogram":
                found |= {f"{family.name}{end}": labels | ({"le"} if end == "_bucket" else set()) for end in HISTOGRAM}
            else:
                found[family.name + ("_total" if family.type == "counter" else "")] = labels
    assert len(found) > 15
    return found


def test_every_metric_of_the_dashboard_is_served(dashboard: dict[str, Any]):
    served = served_metrics()
    used: set[str] = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"skipdecode_\w+", target["expr"])
            assert names, panel["title"]
            assert set(names) <= served.keys(), panel["title"]
            for by in re.findall(r"by \((\w+)\)", target["expr"]):
                assert all(by in served[name] for name in names), panel["title"]
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in target["expr"], panel["title"]
            used |= set(names)
    # And nothing that is served goes unseen, but the sums and counts of histograms.
    assert {name for name in served if not name.endswith(("_sum", "_count"))} == used
    variables = [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert all(name in served for text in variables for name in re.findall(r"skipdecode_\w+", text))


def test_compose_keeps_to_this_machine_and_its_files_are_there(compose: dict[str, Any]):
    for name, service in compose["services"].items():
        for port in service["ports"]:
            assert re.match(r"(\$\{\w+:-)?127\.0\.0\.1", port), f"{name} is open to the network by default"
        assert service["cap_drop"] == ["ALL"]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
        assert ("profiles" in service) == (name != "skipdecode"), "monitoring is optional"
    build = compose["services"]["skipdecode"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", dockerfile(), re.MULTILINE))


def test_prometheus_asks_the_server_with_the_key(compose: dict[str, Any]):
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["skipdecode:8000"]}]
    (key,) = compose["services"]["prometheus"]["configs"]
    assert key["target"] == job["authorization"]["credentials_file"]
    assert "SKIPDECODE_API_KEY" in compose["configs"][key["source"]]["content"]
    assert "SKIPDECODE_API_KEY" in compose["services"]["skipdecode"]["environment"]
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert [s["url"] for s in source["datasources"]] == ["http://prometheus:9090"]


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


def test_the_image_gets_what_it_copies_and_is_no_root(compose: dict[str, Any]):
    allowed = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    copied = [s for line in re.findall(r"^COPY (?!--)(.+) \S+$", dockerfile(), re.MULTILINE) for s in line.split()]
    assert sorted(copied) == sorted(allowed)
    assert all((DEPLOY.parent / name).exists() for name in copied)
    assert re.findall(r"^USER (\d+)$", dockerfile(), re.MULTILINE) == ["10001"]
    assert all("-c constraints.txt" in line for line in dockerfile().splitlines() if "pip install" in line)
    (cache,) = re.findall(r"SKIPDECODE_CACHE=(\S+)", dockerfile())
    assert f"cache:{cache}" in compose["services"]["skipdecode"]["volumes"]


def test_the_commands_are_ones_that_serve_takes(compose: dict[str, Any]):
    import argparse

    parser = argparse.ArgumentParser()
    add_options(parser, Config)
    for words in (
        json.loads(re.findall(r"^CMD (.+)$", dockerfile(), re.MULTILINE)[0]),
        compose["services"]["skipdecode"]["command"],
    ):
        assert words[0] == "serve"
        options = config_from(Config, parser.parse_args(words[1:]))
        assert (options.host, options.port, options.schedule) == ("0.0.0.0", 8000, ())  # full depth: good text
    grace = int(compose["services"]["skipdecode"]["stop_grace_period"].rstrip("s"))
    assert grace > Config(model="m").drain_seconds
