"""The images: what is copied is what the package needs, nobody in them is root, and what they
install is locked."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.command_options import options_of
from tests.support.compose_file import ROOT, baton_services_of, load_compose

LINES = [
    line
    for line in (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]
LOCKS = ROOT / "deploy" / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLIENT = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
#: Extras that each lock answers for.
EXTRAS = {"gateway": ("gateway",), "bench": ("gateway", "bench"), "worker": ("worker",)}
_PINNED = re.compile(r"^([a-z0-9-]+)==(\S+)(?: ; ([^\\\n]+))?", re.MULTILINE)


def stages() -> dict[str, list[str]]:
    """Lines of each stage, those of the stages that it is made from first."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in LINES:
        if line.startswith("FROM "):
            base, _, name = line.removeprefix("FROM ").partition(" AS ")
            found[name] = list(found.get(base, ()))
        elif name or not line.startswith("ARG "):
            found[name].append(line)
    return found


STAGES = stages()


def services_of_the_images() -> dict[str, Any]:
    """By name."""
    services = load_compose()["services"]
    return {name: told for name, told in services.items() if told["image"].startswith("baton:")}


def copied(lines: list[str]) -> set[str]:
    """Sources of the COPY lines that take from the checkout."""
    parts = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    return {source for sources in parts if not sources[0].startswith("--") for source in sources}


def locked(name: str) -> dict[str, set[str]]:
    """Versions of each package in a lock; several where it depends on the Python."""
    found: dict[str, set[str]] = {}
    for package, version, _ in _PINNED.findall((LOCKS / f"{name}.txt").read_text()):
        found.setdefault(package, set()).add(version)
    return found


def test_all_that_the_wheel_is_built_from_is_copied_and_not_ignored() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {package.split("/")[0] for package in wheel["packages"]}
    needed |= {"client", "pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]}
    assert needed <= copied(STAGES["package"])
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    assert {f"!{source}" for source in copied(LINES)} <= set(ignore)


def test_the_user_of_every_target_is_that_of_its_services() -> None:
    for told in services_of_the_images().values():
        users = [line.split()[1] for line in STAGES[told["build"]["target"]] if "USER " in line]
        assert users[-1] == told["user"]
    assert STAGES["worker-rdma"][-1].startswith("USER 10001")
    # The default target is a worker on a CPU.
    assert STAGES[""] == STAGES["worker"]


def test_a_target_exposes_the_ports_that_its_services_listen_on() -> None:
    for name, told in baton_services_of("cpu").items():
        (exposed,) = (
            line.split()[1:] for line in STAGES[told["build"]["target"]] if "EXPOSE " in line
        )
        options = options_of(told["command"], told["environment"])
        ports = [options.port, *([options.bound_http_port] if name == "gateway" else [])]
        assert exposed == [str(port) for port in ports]


def test_a_service_runs_on_the_target_and_the_torch_of_its_profile() -> None:
    images: dict[str, Any] = {}
    for told in services_of_the_images().values():
        # One name is one image.
        assert images.setdefault(told["image"], told["build"]) == told["build"]
    assert images["baton:gateway"]["target"] == "gateway"
    assert images["baton:cpu"]["target"] == "worker"
    assert images["baton:gpu"]["target"] == "worker-gpu"
    for image, torch in (("baton:cpu", "cpu"), ("baton:gpu", "cuda")):
        arguments = images[image]["args"]
        assert arguments["TORCH"] == torch
        assert (LOCKS / f"torch-{torch}.txt").is_file()
        assert arguments.keys() <= {
            line.split()[1].partition("=")[0] for line in LINES if line.startswith("ARG ")
        }


def test_no_source_is_copied_before_what_it_needs_is_installed() -> None:
    for name, lines in STAGES.items():
        if name.endswith("-needs"):
            assert copied(lines) == {"deploy/locks"}, name
    # Laid over what was installed, in the end: one layer is new after an edit, and the kernels are
    # built for their own alone.
    for name in ("gateway", "worker"):
        copies = [line for line in STAGES[name] if line.startswith("COPY ")]
        assert {line.split()[-1] for line in copies} == {"/opt/baton"}
        assert "/package" in copies[-1]
    assert copied(STAGES["kernels"]) == {"deploy/locks", "kernels"}


def test_all_that_is_installed_is_locked_with_hashes_but_for_torch_on_a_cpu() -> None:
    installs = [
        line for line in LINES if "pip install" in line or "backend/bin/python install" in line
    ]
    for line in installs:
        assert "--require-hashes" in line or "torch-$TORCH" in line or "/wheels/" in line
    for path in LOCKS.glob("*.txt"):
        blocks = re.split(r"\n(?=[a-z0-9])", path.read_text())[1:]
        has_hashes = {"--hash=sha256:" in block for block in blocks}
        assert has_hashes == {path.stem != "torch-cpu"}, path
    assert locked("torch-cpu")["torch"] == locked("torch-cuda")["torch"]


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_answers_what_pyproject_asks(name: str) -> None:
    """If not: `make locks`."""
    extras = PROJECT["optional-dependencies"]
    asked = [*CLIENT["dependencies"], *PROJECT["dependencies"]]
    asked += [text for extra in EXTRAS[name] for text in extras[extra]]
    versions = locked(name)
    if name == "worker":
        versions |= locked("torch-cpu")
    for text in asked:
        requirement = Requirement(text)
        if requirement.name == CLIENT["name"]:
            continue  # built beside the rest
        assert requirement.name in versions, requirement.name
        for version in versions[requirement.name]:
            assert requirement.specifier.contains(Version(version)), (text, version)


def test_the_locks_agree_with_each_other() -> None:
    agreed = locked("worker") | locked("torch-cuda")
    for name in ("gateway", "bench"):
        for package, versions in locked(name).items():
            assert versions == agreed.get(package, versions), package


def test_the_gateway_has_nothing_that_computes_or_plots() -> None:
    assert not {"torch", "transformers", "triton", "numpy", "matplotlib"} & locked("gateway").keys()
    assert {"torch", "triton"}.isdisjoint(locked("worker"))


def test_the_gpu_image_has_a_c_compiler_with_its_headers_and_the_others_have_none() -> None:
    installs = {
        name: " ".join(line for line in lines if "apt-get install" in line)
        for name, lines in STAGES.items()
    }
    assert re.search(r"\bgcc libc6-dev\b", installs["worker-gpu"])
    for name in ("gateway", "bench", "worker"):
        assert not re.search(r"\b(gcc|g\+\+)(?=\s)", installs[name]), name


def test_the_load_generator_is_where_compose_runs_it() -> None:
    told = load_compose()["services"]["bench"]
    assert f"COPY bench {told['working_dir']}/bench" in STAGES[told["build"]["target"]]
