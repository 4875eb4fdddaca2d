"""The Kubernetes manifests: their options are ones that the processes take, and their probes ones that they answer."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import yaml

from baton.v1 import inference_pb2, sequence_service_pb2
from tests.support.command_options import options_of
from tests.support.compose_file import ROOT

K8S = ROOT / "deploy" / "k8s"
SERVICES = {
    "gateway": inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    "prefill": sequence_service_pb2.DESCRIPTOR.services_by_name["SequenceService"].full_name,
    "decode": sequence_service_pb2.DESCRIPTOR.services_by_name["SequenceService"].full_name,
}
#: What the cluster would say for a value that it knows only when the pod runs.
FIELD_VALUES = {"metadata.name": "decode-0", "status.podIP": "10.0.0.7"}


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


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_kustomize_builds_it_and_its_options_are_accepted(overlay: str) -> None:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl here")
    done = subprocess.run(
        [program, "kustomize", str(K8S / overlay)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built = [one for one in yaml.safe_load_all(done.stdout) if one["kind"] == "StatefulSet"]
    assert len(built) == 2
    for one in built:
        (container,) = one["spec"]["template"]["spec"]["containers"]
        options = options_of(container["args"], environment(container))
        limits = container["resources"]["limits"]
        assert (options.device == "cuda") is ("nvidia.com/gpu" in limits) is (overlay == "gpu")
        assert container["image"] == ("baton:gpu" if overlay == "gpu" else "baton:cpu")


@pytest.mark.parametrize("name", SERVICES)
def test_a_pod_is_confined_probed_over_grpc_and_may_drain(name: str) -> None:
    spec = workload(name)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    options = options_of(container["args"], environment(container))
    assert spec["terminationGracePeriodSeconds"] >= options.drain_timeout_s + 5
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    # A Service named baton would otherwise set BATON_PORT to something that is no port.
    assert spec["enableServiceLinks"] is False
    grpc = container["readinessProbe"]["grpc"]
    assert grpc == {"port": options.port, "service": SERVICES[name]}
    assert {"startupProbe", "livenessProbe"} <= set(container)


def test_pods_meet_by_the_registry_however_many_they_are() -> None:
    options = {}
    for name in SERVICES:
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
    assert set(allowed["values"]) == set(SERVICES)
