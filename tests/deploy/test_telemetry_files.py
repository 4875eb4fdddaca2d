"""The files of deploy/ that are about telemetry: they name each other, and what Baton tells,
rightly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.telemetry.telemetry import TelemetrySettings, open_telemetry
from gateway.routing.gauges import DISCOVERY_PATH
from tests.support.compose_file import baton_services_of, load_compose

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
#: What each of Baton's processes gets when traces are asked for.
ENDPOINT = "http://collector:4317"


def viewers() -> dict[str, Any]:
    """Services of profile obs, by name."""
    services = load_compose()["services"]
    return {name: told for name, told in services.items() if told["profiles"] == ["obs"]}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize("endpoint", ["", ENDPOINT])
def test_traces_go_where_one_variable_says_and_else_nowhere(profile: str, endpoint: str) -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker-compose here (Debian: apt-get install docker-compose)")
    command = [program, "--profile", profile, "--profile", "obs", "config"]
    given = {**os.environ, "OTLP_ENDPOINT": endpoint}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    ours = baton_services_of(profile)
    assert len(ours) == 3
    for name in ours:
        assert services[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint
        assert services[name]["environment"]["OTEL_METRICS_EXPORTER"] == "none"


def test_without_that_variable_only_prometheus_gets_anything() -> None:
    settings = TelemetrySettings(service="decode", instance="d", version="0", model="m")
    for told in baton_services_of("cpu").values():
        telemetry = open_telemetry(settings, told["environment"])
        assert not telemetry.is_on


def test_the_collector_listens_where_the_comments_say() -> None:
    receiver = load(DEPLOY / "otel" / "collector.yaml")["receivers"]["otlp"]
    assert "collector" in viewers()
    assert ENDPOINT.rpartition(":")[2] == receiver["protocols"]["grpc"]["endpoint"].split(":")[1]
    assert ENDPOINT in (ROOT / "compose.yaml").read_text()


def test_what_is_mounted_is_there_and_only_viewers_are_published() -> None:
    assert viewers().keys() == {"collector", "jaeger", "prometheus", "grafana"}
    for name, told in viewers().items():
        for volume in told.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (ROOT / source).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in told.get("ports", ()))
        assert ("ports" in told) is (name in {"grafana", "jaeger"})


def test_prometheus_fetches_from_the_port_that_the_services_get() -> None:
    services = {name: told for p in ("cpu", "gpu") for name, told in baton_services_of(p).items()}
    (scrape,) = load(DEPLOY / "otel" / "prometheus.yaml")["scrape_configs"]
    (port,) = {told["environment"]["BATON_METRICS_PORT"] for told in services.values()}
    # The gateway's page includes the workers' metrics.
    assert scrape["static_configs"] == [{"targets": [f"gateway:{port}"]}]
    assert [one["url"] for one in scrape["http_sd_configs"]] == [
        f"http://gateway:{port}{DISCOVERY_PATH}"
    ]


def test_grafanas_board_is_where_its_provisioning_looks() -> None:
    grafana = DEPLOY / "grafana"
    (provider,) = load(grafana / "provisioning" / "dashboards" / "baton.yaml")["providers"]
    mounts = viewers()["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in mounts
    kinds = {
        s["type"] for s in load(grafana / "provisioning/datasources/prometheus.yaml")["datasources"]
    }
    board = json.loads((grafana / "dashboards" / "baton.json").read_text())
    (variable,) = board["templating"]["list"]
    assert variable["query"] in kinds


def test_the_collectors_pipelines_are_made_of_what_it_has() -> None:
    collector = load(DEPLOY / "otel" / "collector.yaml")
    assert set(collector["service"]["extensions"]) <= collector["extensions"].keys()
    for pipeline in collector["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= collector[kind].keys()
