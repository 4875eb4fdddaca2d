"""The image: what is copied is what the package needs, and nobody in it is root."""

from __future__ import annotations

import tomllib
from typing import Any

from tests.support.compose_file import ROOT, load_compose

LINES = (ROOT / "Dockerfile").read_text().splitlines()


def services_of_the_image() -> dict[str, Any]:
    """By name."""
    services = load_compose()["services"]
    return {name: told for name, told in services.items() if told["image"].startswith("baton:")}


def copied() -> set[str]:
    """Sources of the COPY lines that take from the checkout."""
    parts = [line.split()[1:-1] for line in LINES if line.startswith("COPY ")]
    return {source for sources in parts if not sources[0].startswith("--") for source in sources}


def test_all_that_the_wheel_is_built_from_is_copied_and_not_ignored() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {package.split("/")[0] for package in wheel["packages"]}
    needed |= {
        "client",
        "pyproject.toml",
        project["project"]["readme"],
        *project["project"]["license-files"],
    }
    assert needed <= copied()
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    assert {f"!{source}" for source in copied()} <= set(ignore)


def test_the_user_is_that_of_the_services() -> None:
    last = LINES[max(i for i, line in enumerate(LINES) if line.startswith("FROM ")) :]
    (user,) = (line.split()[1] for line in last if line.startswith("USER "))
    assert {told["user"] for told in services_of_the_image().values()} == {user}


def test_torch_is_the_build_that_compose_asks_for() -> None:
    for told in services_of_the_image().values():
        (argument,) = told["build"]["args"]
        assert any(line.startswith(f"ARG {argument}") for line in LINES)
        assert told["image"] == ("baton:gpu" if "gpu" in told["profiles"] else "baton:cpu")


def test_the_load_generator_is_where_compose_runs_it_with_what_it_needs() -> None:
    folder = load_compose()["services"]["bench"]["working_dir"]
    last = LINES[max(i for i, line in enumerate(LINES) if line.startswith("FROM ")) :]
    assert f"COPY bench {folder}/bench" in last
    (install,) = (line for line in LINES if line.startswith("RUN pip install") and "[" in line)
    extras = install.partition("[")[2].partition("]")[0].split(",")
    assert {"gateway", "worker", "bench"} <= set(extras)
