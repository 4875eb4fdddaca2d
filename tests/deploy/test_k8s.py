"""The Kubernetes manifests: their options are ones that the processes take, their probes ones that
they answer, and the chart makes the same of them. `make test-chart` has helm and kubectl for it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton import __version__
from tests.support.command_options import options_of
from tests.support.compose_file import ROOT

K8S = ROOT / "deploy" / "k8s"
CHART = ROOT / "deploy" / "helm" / "baton"
TIERS = ("gateway", "prefill", "decode")
PROMETHEUS = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}
#: What the cluster would say for a value that it knows only when the pod runs.
FIELD_VALUES = {"metadata.name": "decode-0", "status.podIP": "10.0.0.7"}
OVERLAYS = ("base", "gpu", "rdma", "model")
#: The chart's values for what an overlay is.
VALUES = {
    "base": (),
    "gpu": ("values-gpu.yaml",),
    "rdma": ("values-gpu.yaml", "values-rdma.yaml"),
}


def manifests(name: str) -> list[Any]:
    return list(yaml.safe_load_all((K8S / "base" / f"{name}.yaml").read_text()))


def policy_of(name: str) -> Any:
    """The network policy by that name."""
    (found,) = (one for one in manifests("network-policy") if one["metadata"]["name"] == name)
    return found


def workload(name: str) -> Any:
    (found,) = (one for one in manifests(name) if one["kind"] in ("Deployment", "StatefulSet"))
    return found


def shared_environment() -> dict[str, str]:
    kustomization = yaml.safe_load((K8S / "base" / "kustomization.yaml").read_text())
    (config,) = kustomization["configMapGenerator"]
    return dict(literal.split("=", 1) for literal in config["literals"])


def environment(container: Any) -> dict[str, str]:
    own = {
        one["name"]: one.get("value") or FIELD_VALUES[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in container["env"]
    }
    return {**shared_environment(), **own}


def kustomized(folder: Path) -> list[Any]:
    """What `kubectl apply -k` would apply."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl here")
    command = [program, "kustomize", "--load-restrictor=LoadRestrictionsNone", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def charted(*options: str) -> list[Any]:
    """What `helm install x` would install; names without that x."""
    done = helm("template", "x", str(CHART), *options)
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace("x-baton", "baton").replace("name: x-", "name: ")
    text = text.replace("serviceName: x-", "serviceName: ").replace("//x-redis", "//redis")
    return [one for one in yaml.safe_load_all(text) if one]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm")
    if program is None:
        pytest.skip("no helm here")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def with_monitoring_and_autoscaling(tmp_path: Path) -> list[Any]:
    """An overlay of a user's, as deploy/k8s/README.md has it."""
    own = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../k8s/base"],
        "components": ["../k8s/monitoring", "../k8s/autoscaling"],
    }
    shutil.copytree(K8S, tmp_path / "k8s")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "kustomization.yaml").write_text(yaml.safe_dump(own))
    return kustomized(tmp_path / "own")


def comparable(manifest: Any) -> Any:
    """What must be alike in a kustomized and a charted manifest: not the order of options, nor
    labels and names of a release."""
    text = json.dumps(manifest["spec"] if "spec" in manifest else manifest["data"])
    spec = json.loads(text)
    spec.pop("replicas", None)

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(one) for one in value]
        if not isinstance(value, dict):
            return value
        cleaned = {name: clean(one) for name, one in value.items()}
        for name in ("labels", "matchLabels", "selector"):
            if isinstance(cleaned.get(name), dict):
                cleaned[name].pop("app.kubernetes.io/instance", None)
                cleaned[name].pop("app.kubernetes.io/part-of", None)
        if not cleaned.get("matchLabels", True):
            del cleaned["matchLabels"]
        cleaned.pop("annotations", None)
        if "configMapRef" in cleaned:
            cleaned["configMapRef"] = {"name": "baton"}
        if "args" in cleaned and cleaned["args"][0] in TIERS:
            cleaned["args"] = sorted(cleaned["args"])
        return cleaned

    return clean(spec)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("overlay", ["base", "gpu", "rdma"])
def test_kustomize_builds_it_and_its_options_are_accepted(overlay: str) -> None:
    built = [one for one in kustomized(K8S / overlay) if one["kind"] == "StatefulSet"]
    assert len(built) == 2
    for one in built:
        (container,) = one["spec"]["template"]["spec"]["containers"]
        options = options_of(container["args"], environment(container))
        limits = container["resources"]["limits"]
        assert (options.device == "cuda") is ("nvidia.com/gpu" in limits) is (overlay != "base")
        assert (options.kv_transport == "nixl") is (overlay == "rdma")
        assert any(name.startswith("rdma/") for name in limits) is (overlay == "rdma")
        kind = {"base": "cpu"}.get(overlay, overlay)
        assert container["image"] == f"baton-worker:{__version__}-{kind}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_manifests_have_the_schema_of_a_cluster(overlay: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in kustomized(K8S / overlay):
        kubernetes_validate.validate(manifest, "1.34", strict=True)


def test_the_chart_has_the_schema_of_a_cluster() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in charted("--set=autoscaling.enabled=true"):
        if "keda" not in manifest["apiVersion"]:
            kubernetes_validate.validate(manifest, "1.34", strict=True)


@pytest.mark.parametrize("name", TIERS)
def test_a_pod_is_confined_probed_over_grpc_and_may_drain(name: str) -> None:
    spec = workload(name)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    options = options_of(container["args"], environment(container))
    assert spec["terminationGracePeriodSeconds"] >= options.drain_timeout_s + 5
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    # A Service named baton would otherwise set BATON_PORT to something that is no port.
    assert spec["enableServiceLinks"] is False
    # Of the whole server, which is that of its services.
    assert container["readinessProbe"]["grpc"] == {"port": options.port}
    assert {"startupProbe", "livenessProbe"} <= set(container)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    expected = {"grpc": options.port, "metrics": options.metrics_port}
    if name == "gateway":
        expected["http"] = options.bound_http_port
    assert ports == expected
    (spread,) = spec["topologySpreadConstraints"]
    labels = workload(name)["spec"]["template"]["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


def test_pods_meet_by_the_registry_however_many_they_are() -> None:
    options = {}
    for name in TIERS:
        (container,) = workload(name)["spec"]["template"]["spec"]["containers"]
        options[name] = options_of(container["args"], environment(container))
    assert (options["gateway"].prefill_workers, options["gateway"].decode_workers) == ((), ())
    (service,) = (one for one in manifests("redis") if one["kind"] == "Service")
    (port,) = service["spec"]["ports"]
    registry = f"redis://{service['metadata']['name']}:{port['port']}/0"
    assert {one.registry for one in options.values()} == {registry}
    for name in ("prefill", "decode"):
        # A name would be that of all pods.
        assert options[name].advertised_host == FIELD_VALUES["status.podIP"]
        (headless,) = (one for one in manifests(name) if one["kind"] == "Service")
        assert workload(name)["spec"]["serviceName"] == headless["metadata"]["name"]


def test_redis_is_confined_keeps_nothing_and_only_batons_pods_reach_it() -> None:
    spec = workload("redis")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    command = container["args"]
    pairs = dict(zip(command[1::2], command[2::2], strict=True))
    assert (pairs["--save"], pairs["--appendonly"]) == ("", "no")
    assert all("persistentVolumeClaim" not in volume for volume in spec["volumes"])
    policy = policy_of("redis")["spec"]
    labels = workload("redis")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = policy["ingress"]
    (allowed,) = rule["from"][0]["podSelector"]["matchExpressions"]
    assert set(allowed["values"]) == set(TIERS)


def test_prometheus_reaches_metrics_and_clients_the_two_doors_and_nobody_else_anything() -> None:
    baton, metrics = policy_of("workers")["spec"]["ingress"]
    assert metrics == {"from": [PROMETHEUS], "ports": [{"protocol": "TCP", "port": "metrics"}]}
    (pods,) = baton["from"]
    assert set(pods["podSelector"]["matchExpressions"][0]["values"]) == set(TIERS)
    anyone, metrics = policy_of("gateway")["spec"]["ingress"]
    (service,) = (one for one in manifests("gateway") if one["kind"] == "Service")
    doors = {port["targetPort"] for port in service["spec"]["ports"]}
    assert doors == {"grpc", "http"}
    assert anyone.keys() == {"ports"}
    assert {port["port"] for port in anyone["ports"]} == doors
    assert metrics["from"] == [PROMETHEUS]


def test_one_pod_of_a_tier_is_disrupted_at_a_time() -> None:
    budgets = {one["metadata"]["name"]: one["spec"] for one in manifests("disruption")}
    assert budgets.keys() == set(TIERS)
    for name, budget in budgets.items():
        labels = workload(name)["spec"]["template"]["metadata"]["labels"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()
        assert budget["maxUnavailable"] == 1


def test_the_operator_finds_every_pod_that_has_metrics_and_has_the_alerts(tmp_path: Path) -> None:
    built = with_monitoring_and_autoscaling(tmp_path)
    (monitor,) = (one for one in built if one["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    found = set()
    for one in built:
        if one["kind"] in ("Deployment", "StatefulSet"):
            pod = one["spec"]["template"]
            ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            if wanted.items() <= pod["metadata"]["labels"].items() and endpoint["port"] in ports:
                found.add(one["metadata"]["name"])
    assert found == set(TIERS)
    (rules,) = (one for one in built if one["kind"] == "PrometheusRule")
    alerts = yaml.safe_load((ROOT / "deploy" / "otel" / "alerts.yaml").read_text())
    assert rules["spec"] == alerts


@pytest.mark.slow
def test_what_is_scaled_is_there(tmp_path: Path) -> None:
    built = with_monitoring_and_autoscaling(tmp_path)
    names = {(one["kind"], one["metadata"]["name"]) for one in built}
    scalers = [one for one in built if one["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")]
    assert {one["metadata"]["name"] for one in scalers} == set(TIERS)
    for one in scalers:
        target = one["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
    # Their queries: tests/telemetry/test_board.py.


def test_the_model_is_fetched_into_the_claim_that_the_pods_mount() -> None:
    (claim,) = yaml.safe_load_all((K8S / "model" / "claim.yaml").read_text())
    job = yaml.safe_load((K8S / "model" / "fetch.yaml").read_text())
    for one in (job, *(workload(name) for name in TIERS)):
        spec = one["spec"]["template"]["spec"]
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in spec["volumes"]
            if "persistentVolumeClaim" in volume
        ]
        assert claims == [claim["metadata"]["name"]]
        assert spec["securityContext"]["runAsUser"] == 10001


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("overlay", VALUES)
def test_the_chart_makes_what_kustomize_makes(overlay: str) -> None:
    plain = {
        (one["kind"], one["metadata"]["name"].partition("-t")[0]): one
        for one in kustomized(K8S / overlay)
    }
    values = [f"--values={CHART / name}" for name in VALUES[overlay]]
    chart = {(one["kind"], one["metadata"]["name"]): one for one in charted(*values)}
    (config,) = (key for key in plain if key[0] == "ConfigMap")
    plain["ConfigMap", "baton"] = plain.pop(config)
    assert chart.keys() == plain.keys()
    for key, manifest in chart.items():
        assert comparable(manifest) == comparable(plain[key]), key


def test_the_chart_refuses_values_that_it_does_not_have() -> None:
    for unknown in ("gateway.replica=2", "workers.options=[]", "registri=x"):
        done = helm("template", "x", str(CHART), f"--set={unknown}")
        assert done.returncode != 0, unknown
    assert "name a Redis" in helm("template", "x", str(CHART), "--set=redis.enabled=false").stderr


def test_the_charts_workers_may_differ_by_tier() -> None:
    tiers = {
        one["metadata"]["name"]: one["spec"]
        for one in charted("--set=decode.replicas=3,decode.options.max-num-seqs=32")
        if one["kind"] == "StatefulSet"
    }
    assert (tiers["prefill"]["replicas"], tiers["decode"]["replicas"]) == (1, 3)
    args = {name: spec["template"]["spec"]["containers"][0]["args"] for name, spec in tiers.items()}
    assert "--max-num-seqs=32" in args["decode"]
    assert len(args["prefill"]) == len(args["decode"]) - 1
