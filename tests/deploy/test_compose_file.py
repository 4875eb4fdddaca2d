"""What compose.yaml promises about every service."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

from tests.support.command_options import options_of
from tests.support.compose_file import ROOT, load_compose, services_of

PROFILES = ("cpu", "gpu")
ALL = [(profile, name) for profile in PROFILES for name in services_of(profile)]
GRACE_MARGIN_S = 5.0


def seconds(text: str) -> float:
    assert text.endswith("s"), text
    return float(text[:-1])


@pytest.fixture(params=ALL, ids=lambda pair: pair[1])
def service(request: pytest.FixtureRequest) -> Any:
    profile, name = request.param
    return services_of(profile)[name]


@pytest.mark.parametrize("profile", PROFILES)
def test_docker_compose_accepts_the_profile(profile: str) -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker-compose here (Debian: apt-get install docker-compose)")
    command = [program, "--profile", profile, "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_profile_has_the_three_tiers_and_no_service_runs_without_one() -> None:
    for profile in PROFILES:
        commands = sorted(told["command"][0] for told in services_of(profile).values())
        assert commands == ["decode", "gateway", "prefill"]
    assert sorted(load_compose()["services"]) == sorted(name for _, name in ALL)


def test_a_container_can_do_no_more_than_it_must(service: Any) -> None:
    uid, gid = service["user"].split(":")
    assert int(uid) > 0
    assert int(gid) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service
    models = [volume for volume in service["volumes"] if ":/model" in volume]
    assert len(models) == 1
    assert models[0].endswith(":ro")
    assert service["command"][-1] == "/model"


def test_a_service_may_drain_before_it_is_killed(service: Any) -> None:
    options = options_of(service["command"], service["environment"])
    assert seconds(service["stop_grace_period"]) >= options.drain_timeout_s + GRACE_MARGIN_S


def test_a_service_has_time_to_start_before_its_health_counts(service: Any) -> None:
    check = service["healthcheck"]
    assert check["test"][:3] == ["CMD", "baton", "health"]
    assert seconds(check["start_period"]) > 0
    assert service["init"] is True


@pytest.mark.parametrize("profile", PROFILES)
def test_only_the_gateway_has_a_way_out_and_it_waits_for_healthy_workers(profile: str) -> None:
    services = services_of(profile)
    networks = load_compose()["networks"]
    assert networks["inner"]["internal"] is True
    for name, told in services.items():
        is_gateway = told["command"][0] == "gateway"
        assert ("front" in told["networks"]) is is_gateway
        assert ("ports" in told) is is_gateway
        if is_gateway:
            assert told["ports"][0].startswith("127.0.0.1:")
            assert told["depends_on"] == {
                other: {"condition": "service_healthy"} for other in services if other != name
            }


@pytest.mark.parametrize("profile", PROFILES)
def test_the_tiers_agree_and_are_found_under_the_names_given_to_the_gateway(profile: str) -> None:
    by_verb = {told["command"][0]: told for told in services_of(profile).values()}
    options = {
        verb: options_of(told["command"], told["environment"]) for verb, told in by_verb.items()
    }
    assert len({told.model_name for told in options.values()}) == 1
    gateway = options["gateway"]
    for verb, addresses in (
        ("prefill", gateway.prefill_workers),
        ("decode", gateway.decode_workers),
    ):
        assert addresses == (f"{by_verb[verb]['hostname']}:{options[verb].port}",)
        assert options[verb].kv_host == by_verb[verb]["hostname"]
        assert options[verb].host == "0.0.0.0"


def test_workers_share_a_directory_for_sockets_that_only_their_user_enters() -> None:
    compose = load_compose()
    for profile in PROFILES:
        for told in services_of(profile).values():
            if told["command"][0] != "gateway":
                assert f"kv-sockets:{told['environment']['TMPDIR']}" in told["volumes"]
                uid = told["user"].split(":")[0]
                mount = compose["volumes"]["kv-sockets"]["driver_opts"]["o"].split(",")
                assert f"uid={uid}" in mount
                assert "mode=0700" in mount


def test_gpus_of_the_tiers_are_disjoint() -> None:
    reserved: list[str] = []
    for told in services_of("gpu").values():
        if told["command"][0] != "gateway":
            (device,) = told["deploy"]["resources"]["reservations"]["devices"]
            assert device["capabilities"] == ["gpu"]
            reserved += device["device_ids"]
        else:
            assert "deploy" not in told
    assert len(reserved) == len(set(reserved)) == 2
