"""The Kubernetes manifests: their options are ones that the processes take, and their probes ones that they answer."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import yaml

from baton.v1 import decode_pb2, inference_pb2, prefill_pb2
from tests.support.command_options import options_of
from tests.support.compose_file import ROOT

K8S = ROOT / "deploy" / "k8s"
SERVICES = {
    "gateway": inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    "prefill": prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
    "decode": decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name,
}
#: What the cluster would say for a value that it knows only when the pod runs.
FIELD_VALUES = {"metadata.name": "decode-0", "status.podIP": "10.0.0.7"}


def manifests(name: str) -> list[Any]:
    return list(yaml.safe_load_all((K8S / "base" / f"{name}.yaml").read_text()))


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


def test_the_gateway_knows_every_pod_of_the_workers() -> None:
    (container,) = workload("gateway")["spec"]["template"]["spec"]["containers"]
    gateway = options_of(container["args"], environment(container))
    for name, addresses in (
        ("prefill", gateway.prefill_workers),
        ("decode", gateway.decode_workers),
    ):
        told = workload(name)
        (service,) = (one for one in manifests(name) if one["kind"] == "Service")
        assert service["spec"]["clusterIP"] == "None"
        assert told["spec"]["serviceName"] == service["metadata"]["name"]
        names = [f"{name}-{i}.{name}:50051" for i in range(told["spec"]["replicas"])]
        assert list(addresses) == names
