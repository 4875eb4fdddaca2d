"""The Helm chart: its options are ones that the processes take, its probes ones that they answer.
`make test-chart` has helm and Kubernetes's schemas for it."""

from __future__ import annotations

import functools
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from baton import __version__
from tests.support.command_options import options_of
from tests.support.compose_file import ROOT

CHART = ROOT / "deploy" / "helm" / "baton"
TIERS = ("gateway", "prefill", "decode")
PROMETHEUS = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}
#: Values that a cluster fills in when the pod runs.
FIELD_VALUES = {"metadata.name": "decode-0", "status.podIP": "10.0.0.7"}
EVERYTHING = "--set=autoscaling.enabled=true,podMonitor.enabled=true"
#: Options of helm, by where engines run and how KV travels.
VALUES = {
    "base": (),
    "gpu": (f"--values={CHART / 'values-gpu.yaml'}",),
    "rdma": tuple(f"--values={CHART / name}" for name in ("values-gpu.yaml", "values-rdma.yaml")),
}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm")
    if program is None:
        pytest.skip("no helm here")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


@functools.cache
def charted(*options: str) -> tuple[Any, ...]:
    """The manifests that `helm install x` would apply; names without the release's x."""
    done = helm("template", "x", str(CHART), *options)
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace("x-baton", "baton").replace("name: x-", "name: ")
    text = text.replace("serviceName: x-", "serviceName: ").replace("//x-redis", "//redis")
    return tuple(one for one in yaml.safe_load_all(text) if one)


def manifest(kind: str, name: str) -> Any:
    (found,) = (one for one in charted() if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def workload(name: str) -> Any:
    return manifest("StatefulSet" if name in ("prefill", "decode") else "Deployment", name)


def environment(container: Any, manifests: tuple[Any, ...]) -> dict[str, str]:
    (config,) = (one for one in manifests if one["kind"] == "ConfigMap")
    own = {
        one["name"]: one.get("value") or FIELD_VALUES[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in container["env"]
    }
    return {**config["data"], **own}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("overlay", VALUES)
def test_the_chart_renders_and_its_options_are_accepted(overlay: str) -> None:
    manifests = charted(*VALUES[overlay])
    built = [one for one in manifests if one["kind"] == "StatefulSet"]
    assert len(built) == 2
    for one in built:
        (container,) = one["spec"]["template"]["spec"]["containers"]
        options = options_of(container["args"], environment(container, manifests))
        limits = container["resources"]["limits"]
        assert (options.device == "cuda") is ("nvidia.com/gpu" in limits) is (overlay != "base")
        assert (options.kv_transport == "nixl") is (overlay == "rdma")
        assert any(name.startswith("rdma/") for name in limits) is (overlay == "rdma")
        kind = {"base": "cpu"}.get(overlay, overlay)
        assert container["image"] == f"baton-worker:{__version__}-{kind}"


@pytest.mark.parametrize("overlay", VALUES)
def test_the_chart_has_the_schema_of_a_cluster(overlay: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for one in charted(*VALUES[overlay], EVERYTHING):
        if one["kind"] not in ("ScaledObject", "PodMonitor"):
            kubernetes_validate.validate(one, "1.34", strict=True)


@pytest.mark.parametrize("name", TIERS)
def test_a_pod_is_confined_probed_over_grpc_and_may_drain(name: str) -> None:
    spec = workload(name)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    options = options_of(container["args"], environment(container, charted()))
    assert spec["terminationGracePeriodSeconds"] >= options.drain_timeout_s + 5
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    # A Service named baton would otherwise set BATON_PORT to something that is no port.
    assert spec["enableServiceLinks"] is False
    # The server's health, which includes that of its services.
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
        options[name] = options_of(container["args"], environment(container, charted()))
    assert (options["gateway"].prefill_workers, options["gateway"].decode_workers) == ((), ())
    service = manifest("Service", "redis")
    (port,) = service["spec"]["ports"]
    registry = f"redis://{service['metadata']['name']}:{port['port']}/0"
    assert {one.registry for one in options.values()} == {registry}
    for name in ("prefill", "decode"):
        # A name would be that of all pods.
        assert options[name].advertised_host == FIELD_VALUES["status.podIP"]
        headless = manifest("Service", workload(name)["spec"]["serviceName"])
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
    policy = manifest("NetworkPolicy", "redis")["spec"]
    labels = workload("redis")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = policy["ingress"]
    (allowed,) = rule["from"][0]["podSelector"]["matchExpressions"]
    assert set(allowed["values"]) == set(TIERS)


def test_prometheus_reaches_metrics_and_clients_the_two_doors_and_nobody_else_anything() -> None:
    baton, metrics = manifest("NetworkPolicy", "workers")["spec"]["ingress"]
    assert metrics == {"from": [PROMETHEUS], "ports": [{"protocol": "TCP", "port": "metrics"}]}
    (pods,) = baton["from"]
    assert set(pods["podSelector"]["matchExpressions"][0]["values"]) == set(TIERS)
    anyone, metrics = manifest("NetworkPolicy", "gateway")["spec"]["ingress"]
    service = manifest("Service", "gateway")
    doors = {port["targetPort"] for port in service["spec"]["ports"]}
    assert doors == {"grpc", "http"}
    assert anyone.keys() == {"ports"}
    assert {port["port"] for port in anyone["ports"]} == doors
    assert metrics["from"] == [PROMETHEUS]


def test_one_pod_of_a_tier_is_disrupted_at_a_time() -> None:
    budgets = {
        one["metadata"]["name"]: one["spec"]
        for one in charted()
        if one["kind"] == "PodDisruptionBudget"
    }
    assert budgets.keys() == set(TIERS)
    for name, budget in budgets.items():
        labels = workload(name)["spec"]["template"]["metadata"]["labels"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()
        assert budget["maxUnavailable"] == 1


def test_the_operator_finds_every_pod_that_has_metrics() -> None:
    built = charted(EVERYTHING)
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


def test_what_is_scaled_is_there() -> None:
    built = charted(EVERYTHING)
    names = {(one["kind"], one["metadata"]["name"]) for one in built}
    scalers = [one for one in built if one["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")]
    assert {one["metadata"]["name"] for one in scalers} == set(TIERS)
    for one in scalers:
        target = one["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
    # Their queries: tests/deploy/test_grafana_board.py.
    scaled = [one["spec"] for one in scalers if one["kind"] == "ScaledObject"]
    triggers = [trigger["metadata"] for spec in scaled for trigger in spec["triggers"]]
    assert len(triggers) == 4
    # By default KEDA takes a query without an answer for 0, and workers would go.
    assert all(trigger["ignoreNullValues"] == "false" for trigger in triggers)


def test_by_the_planner_the_decode_tier_alone_is_scaled() -> None:
    planner = "--set=autoscaling.planner=true,prefill.replicas=3"
    slo = "--set=gateway.args={--slo-ttft-ms=500}"
    built = charted(EVERYTHING, planner, slo)
    (scaler,) = (one for one in built if one["kind"] == "ScaledObject")
    assert scaler["metadata"]["name"] == "decode"
    (trigger,) = scaler["spec"]["triggers"]
    assert trigger["metadata"]["query"].startswith("max(baton_planner_workers_wanted{")
    assert trigger["metadata"]["query"].endswith("}) - 3")
    assert trigger["metadata"]["threshold"] == "1"
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    # Else a difference of up to a tenth is none.
    behavior = scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert [behavior[way]["tolerance"] for way in ("scaleDown", "scaleUp")] == [0, 0]
    sets = {one["metadata"]["name"]: one for one in built if one["kind"] == "StatefulSet"}
    assert sets["prefill"]["spec"]["replicas"] == 3
    assert "replicas" not in sets["decode"]["spec"]
    kind_and_name = ("Deployment", "gateway")
    (gateway,) = (one for one in built if (one["kind"], one["metadata"]["name"]) == kind_and_name)
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    options = options_of(container["args"], environment(container, built))
    assert (options.planner, options.min_workers, options.max_workers) == ("on", 4, 11)


@pytest.mark.parametrize("name", TIERS)
def test_pods_mount_the_claim_of_the_model(name: str) -> None:
    spec = workload(name)["spec"]["template"]["spec"]
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert claims == [values["model"]["claimName"]]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["fsGroup"]) == (
        10001,
    ) * 2


def test_the_chart_refuses_values_that_it_does_not_have() -> None:
    for unknown in ("gateway.replica=2", "workers.options=[]", "registri=x"):
        done = helm("template", "x", str(CHART), f"--set={unknown}")
        assert done.returncode != 0, unknown
    assert "name a Redis" in helm("template", "x", str(CHART), "--set=redis.enabled=false").stderr


SEVERAL_HOSTS = "--set=decode.hosts=2,decode.options.pipeline-parallel-size=2"
#: What the controller of LeaderWorkerSets gives the second pod of a group.
GROUP_VALUES = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "baton-decode-0.baton-decode.default",
}


def pods_of_group(manifests: tuple[Any, ...]) -> tuple[Any, Any]:
    """Templates of the pod that serves, and of another one."""
    (group,) = (one for one in manifests if one["kind"] == "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    # A host that ends alone would wait for the others, which have ended as well.
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    return template["leaderTemplate"], template["workerTemplate"]


def test_hosts_of_a_worker_find_each_other() -> None:
    manifests = charted(SEVERAL_HOSTS)
    names = [one["metadata"]["name"] for one in manifests if one["kind"] == "StatefulSet"]
    assert names == ["prefill"]
    found = []
    for pod in pods_of_group(manifests):
        (container,) = pod["spec"]["containers"]
        variables = environment(container, manifests)
        text = "\n".join(container["args"])
        for name, value in (variables | GROUP_VALUES).items():
            text = text.replace(f"$({name})", value)
        found.append(options_of(text.split("\n"), variables))
    first, other = found
    assert (first.nnodes, first.node_rank, other.nnodes, other.node_rank) == (2, 0, 2, 1)
    assert first.pipeline_parallel_size == other.pipeline_parallel_size == 2
    # Node 0 listens there, and its own name may not be known yet.
    assert first.master_addr == FIELD_VALUES["status.podIP"]
    assert other.master_addr == GROUP_VALUES["LWS_LEADER_ADDRESS"]


def test_only_the_first_host_of_a_worker_is_probed() -> None:
    first, other = (pod["spec"]["containers"][0] for pod in pods_of_group(charted(SEVERAL_HOSTS)))
    probed = {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
    assert first.keys() - other.keys() == probed
    same = first.keys() - probed - {"args"}
    assert {key: first[key] for key in same} == {key: other[key] for key in same}


def test_hosts_of_a_worker_have_the_schema_of_pods_and_are_scaled() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    manifests = charted(SEVERAL_HOSTS, EVERYTHING)
    for pod in pods_of_group(manifests):
        named = {"metadata": {"name": "decode-0", **pod["metadata"]}, "spec": pod["spec"]}
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", **named}, "1.34", strict=True
        )
    (target,) = (
        one["spec"]["scaleTargetRef"]
        for one in manifests
        if (one["kind"], one["metadata"]["name"]) == ("ScaledObject", "decode")
    )
    assert target["kind"] == "LeaderWorkerSet"


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
