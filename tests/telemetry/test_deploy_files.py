"""The files of deploy/ that are about telemetry: they name each other, and what Baton tells, rightly."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose.obs.yaml"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_docker_compose_accepts_it_beside_the_services(profile: str) -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker-compose here (Debian: apt-get install docker-compose)")
    files = ("-f", "compose.yaml", "-f", str(COMPOSE.relative_to(ROOT)))
    command = [program, *files, "--profile", profile, "--profile", "obs", "config"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    ours = [told for told in services.values() if told.get("image", "").startswith("baton:")]
    assert len(ours) >= 3
    for told in ours:
        assert told["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4317"
        assert told["environment"]["HF_HUB_OFFLINE"] == "1", "the service's own environment stays"


def test_what_is_mounted_is_there_and_only_viewers_are_published() -> None:
    for name, told in load(COMPOSE)["services"].items():
        for volume in told.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (ROOT / source).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in told.get("ports", ()))
        assert ("ports" in told) is (name in {"grafana", "jaeger"})


def test_prometheus_fetches_from_the_port_that_the_services_get() -> None:
    services = load(COMPOSE)["services"]
    (scrape,) = load(DEPLOY / "otel" / "prometheus.yaml")["scrape_configs"]
    targets = scrape["static_configs"][0]["targets"]
    port = services["gateway"]["environment"]["BATON_METRICS_PORT"]
    assert targets == [f"{name}:{port}" for name in ("gateway", "prefill", "decode")]


def test_grafanas_board_is_where_its_provisioning_looks() -> None:
    grafana = DEPLOY / "grafana"
    (provider,) = load(grafana / "provisioning" / "dashboards" / "baton.yaml")["providers"]
    mounts = load(COMPOSE)["services"]["grafana"]["volumes"]
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
