"""What compose.yaml promises about every service."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_options import options_of
from tests.support.compose_file import ROOT, baton_services_of, load_compose, services_of

PROFILES = ("cpu", "gpu", "hosts")
BESIDE = ("obs", "bench")
ALL = [(profile, name) for profile in PROFILES for name in baton_services_of(profile)]
COMBINATIONS = [
    chosen
    for engines in ((), *((profile,) for profile in PROFILES))
    for beside in ((), ("obs",), ("bench",), BESIDE)
    if (chosen := (*engines, *beside))
]
#: Only the gateway and the pages for people are published.
PUBLISHED = {"gateway", "gateway-gpu", "gateway-hosts", "grafana", "jaeger"}
#: The second host of a worker, which takes no requests.
OTHER_HOST = "decode-other"
STARTED = {"condition": "service_started"}
GRACE_MARGIN_S = 5.0


def seconds(text: str) -> float:
    assert text.endswith("s"), text
    return float(text[:-1])


def serving_of(profile: str) -> dict[str, Any]:
    """Services of one profile that take requests, by name."""
    services = baton_services_of(profile)
    return {name: told for name, told in services.items() if name != OTHER_HOST}


@pytest.fixture(params=ALL, ids=lambda pair: pair[1])
def service(request: pytest.FixtureRequest) -> Any:
    profile, name = request.param
    return baton_services_of(profile)[name]


@pytest.mark.slow
@pytest.mark.parametrize("profiles", COMBINATIONS, ids="+".join)
def test_docker_compose_accepts_the_profiles(profiles: tuple[str, ...]) -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker-compose here (Debian: apt-get install docker-compose)")
    chosen = [f"--profile={profile}" for profile in profiles]
    command = [program, *chosen, "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_profile_has_the_three_tiers_and_a_redis() -> None:
    for profile in PROFILES:
        commands = sorted(told["command"][0] for told in services_of(profile).values())
        hosts = ["decode"] if profile == "hosts" else []
        namespaces = ["infinity"] if profile == "gpu" else []
        assert commands == ["decode", *hosts, "gateway", *namespaces, "prefill", "redis-server"]


def test_two_hosts_of_a_worker_find_each_other_and_end_together() -> None:
    services = baton_services_of("hosts")
    first, other = services["decode-first"], services[OTHER_HOST]
    options = [options_of(told["command"], told["environment"]) for told in (first, other)]
    assert [each.node_rank for each in options] == [0, 1]
    assert {each.master_addr for each in options} == {first["hostname"]}
    for name in ("nnodes", "pipeline_parallel_size", "master_port", "num_threads"):
        assert len({getattr(each, name) for each in options}) == 1, name
    assert options[0].nnodes == options[0].pipeline_parallel_size == 2
    assert other["healthcheck"] == {"disable": True}
    assert first["restart"] == other["restart"] == "unless-stopped"


def test_no_service_runs_without_a_profile_or_waits_for_one_of_another() -> None:
    services = load_compose()["services"]
    for told in services.values():
        assert set(told["profiles"]) <= {*PROFILES, *BESIDE}
        assert told["profiles"]
        for other in told.get("depends_on", ()):
            assert set(told["profiles"]) <= set(services[other]["profiles"])


def test_every_container_is_confined_and_only_what_must_be_is_published() -> None:
    for name, told in load_compose()["services"].items():
        assert int(told["user"].split(":")[0]) > 0, name
        assert told["read_only"] is True, name
        assert told["cap_drop"] == ["ALL"], name
        assert told["security_opt"] == ["no-new-privileges:true"], name
        assert ":" in told["image"], name
        assert not told["image"].endswith(":latest"), name
        assert ("ports" in told) is ("front" in told["networks"]) is (name in PUBLISHED), name
        assert all(port.startswith("127.0.0.1:") for port in told.get("ports", ())), name
        assert "inner" in told["networks"], name


def test_redis_keeps_nothing_and_is_asked_for_its_health() -> None:
    told = load_compose()["services"]["redis"]
    pairs = dict(zip(told["command"][1::2], told["command"][2::2], strict=True))
    assert (pairs["--save"], pairs["--appendonly"]) == ("", "no")
    assert "volumes" not in told
    assert told["healthcheck"]["test"][:2] == ["CMD", "redis-cli"]
    assert seconds(told["healthcheck"]["start_period"]) > 0


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
    assert service["init"] is True
    if service.get("hostname") == OTHER_HOST:
        return
    check = service["healthcheck"]
    assert check["test"][:3] == ["CMD", "baton", "health"]
    assert seconds(check["start_period"]) > 0


@pytest.mark.parametrize("profile", PROFILES)
def test_only_the_gateway_has_a_way_out_and_it_stops_before_its_workers(profile: str) -> None:
    services = baton_services_of(profile)
    networks = load_compose()["networks"]
    assert networks["inner"]["internal"] is True
    for name, told in services.items():
        is_gateway = told["command"][0] == "gateway"
        assert ("front" in told["networks"]) is is_gateway
        assert ("ports" in told) is is_gateway
        if is_gateway:
            options = options_of(told["command"], told["environment"])
            ports = (options.port, options.bound_http_port)
            assert tuple(told["ports"]) == tuple(f"127.0.0.1:{port}:{port}" for port in ports)
            # It starts beside them: it waits for nobody's health, since its own is that of the
            # fleet.
            others = services.keys() - {name} | {"redis"}
            assert told["depends_on"] == dict.fromkeys(others, STARTED)
        else:
            shared = ["gpu-namespaces"] if profile == "gpu" else []
            assert told["depends_on"] == dict.fromkeys(["redis", *shared], STARTED)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_tiers_agree_and_are_found_under_the_names_given_to_the_gateway(profile: str) -> None:
    by_verb = {told["command"][0]: told for told in serving_of(profile).values()}
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
        # The registry names a worker as the gateway's list does: one worker is one address.
        assert addresses == (f"{options[verb].advertised_host}:{options[verb].port}",)
    assert {told.registry for told in options.values()} == {"redis://redis:6379/0"}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_gateway_has_one_name_within_whatever_the_profile(profile: str) -> None:
    names = set()
    for name, told in baton_services_of(profile).items():
        if told["command"][0] == "gateway":
            names = {name}
            if isinstance(told["networks"], dict):
                names |= set(told["networks"]["inner"]["aliases"])
    assert "gateway" in names


@pytest.mark.slow
def test_the_load_generator_takes_its_command_and_writes_where_it_may() -> None:
    told = load_compose()["services"]["bench"]
    python, module, name, *given = told["entrypoint"]
    assert (python, module, name) == ("python", "-m", "bench.load")
    (mount,) = told["volumes"]
    written = [one for one in given if one.startswith(("--json=", "--plot="))]
    assert len(written) == 2
    assert {path.partition("=")[2].rpartition("/")[0] for path in written} == {mount.split(":")[-1]}
    assert "--address=gateway:50051" in given
    # Asked for help, it still reads all options before; one that is not there is an error.
    done = subprocess.run(
        [sys.executable, module, name, *given, *told["command"], "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert told["networks"] == ["inner"]


def test_workers_share_a_directory_for_sockets_that_only_their_user_enters() -> None:
    compose = load_compose()
    for profile in PROFILES:
        for told in baton_services_of(profile).values():
            if told["command"][0] != "gateway":
                assert f"kv-sockets:{told['environment']['TMPDIR']}" in told["volumes"]
                uid = told["user"].split(":")[0]
                mount = compose["volumes"]["kv-sockets"]["driver_opts"]["o"].split(",")
                assert f"uid={uid}" in mount
                assert "mode=0700" in mount


def test_workers_on_gpus_keep_compiled_kernels_in_one_volume_where_their_image_has_them() -> None:
    """Its owner and first content are the image's folder's. The image itself names no cache: where
    nothing is mounted, its file system may be read-only."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "ENV TRITON_CACHE_DIR" not in dockerfile
    for told in baton_services_of("gpu").values():
        if told["command"][0] != "gateway":
            (mount,) = (each for each in told["volumes"] if each.startswith("gpu-kernels:"))
            folder, uid = told["environment"]["TRITON_CACHE_DIR"], told["user"].split(":")[0]
            assert Path(folder).is_relative_to(mount.removeprefix("gpu-kernels:"))
            assert re.search(
                rf"^RUN install .*--owner={uid} .* {folder}$", dockerfile, re.MULTILINE
            )
    assert "gpu-kernels" in load_compose()["volumes"]


def test_the_table_of_gpus_gives_each_tier_its_own_and_shows_it_all() -> None:
    rows = re.findall(
        r"^\| (\d) \| `([\d,]+)` \| `([\d,]+)` \| (\d) \|",
        (ROOT / "docs" / "operating.md").read_text(),
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    for count, prefill, decode, size in rows:
        own = [list(map(int, ids.split(","))) for ids in (prefill, decode)]
        assert all(sorted(ids) == list(range(int(count))) for ids in own)
        taken = [set(ids[: int(size)]) for ids in own]
        assert taken[0].isdisjoint(taken[1]) is (int(count) > 1)
        assert len(taken[0] | taken[1]) == int(count)


def test_both_tiers_run_where_there_is_one_gpu_and_map_memory_of_each_other() -> None:
    services = services_of("gpu")
    for service in baton_services_of("gpu").values():
        if service["command"][0] == "gateway":
            assert "deploy" not in service
            assert "pid" not in service
            continue
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        # CUDA shows no device from the first id on that is not there.
        assert service["environment"]["CUDA_VISIBLE_DEVICES"] == "0"
        assert service["ipc"] == service["pid"] == "service:gpu-namespaces"
        assert service["depends_on"]["gpu-namespaces"] == STARTED
        assert "redis" in service["depends_on"]
    assert services["gpu-namespaces"]["ipc"] == "shareable"
    assert "gpu-namespaces" not in services_of("cpu")
