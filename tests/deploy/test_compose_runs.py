"""compose.yaml's own commands and environments, as processes of this host, answer a request."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from baton.client import AsyncClient
from baton.supervisor import ChildSpec
from baton.supervisor.child import Child
from baton.supervisor.serving import wait_until_serving
from baton_kernels.cpu.library import NO_LEVEL, chosen_level, find_or_build
from tests.support.compose_file import ROOT, Localhost, entrypoint, services_of
from tests.support.metrics_page import fetch_metrics, free_ports
from tests.support.redis_server import redis_executable

# Eight interpreters start one after the other: a minute, minutes on a machine that does much else.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

KV_SOCKETS = "/run/baton-kv"


def in_start_order(services: Mapping[str, Any]) -> list[str]:
    """Names, each after those that it waits for."""
    order: list[str] = []
    while len(order) < len(services):
        free = [
            name
            for name, told in services.items()
            if name not in order and set(told.get("depends_on", {})) <= set(order)
        ]
        assert free, "depends_on has a circle"
        order += free
    return order


def world(tmp_path: Path, services: Mapping[str, Any], addresses: Mapping[str, str]) -> Localhost:
    """Each service's mounts are the same here, so one table does for all."""
    mounts = {"/tmp": str(tmp_path / "tmp"), KV_SOCKETS: str(tmp_path / "kv")}
    for told in services.values():
        for volume in told.get("volumes", ()):
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                mounts[target] = str((ROOT / source).resolve())
    return Localhost(mounts, addresses)


@asynccontextmanager
async def running_redis(command: Sequence[str], folder: Path) -> AsyncIterator[int]:
    """The service's own command, on a free port of loopback; yields the port once it takes
    connections."""
    program, *arguments = command
    assert program == "redis-server"
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        redis_executable(),
        *arguments,
        *("--port", str(port), "--bind", "127.0.0.1"),
        cwd=folder,
        stdin=DEVNULL,
        stdout=PIPE,
    )
    stream = process.stdout
    assert stream is not None
    try:
        log = b""
        while b"eady to accept connections" not in log:
            line = await stream.readline()
            assert line, f"redis-server ended: {log!r}"
            log += line
        yield port
    finally:
        process.kill()
        await process.communicate()


async def registered(port: int) -> set[str]:
    """Addresses on the registry's list."""
    async with Redis(port=port) as redis:
        keys = [key.decode() async for key in redis.scan_iter("baton:1:worker:*")]
    return {key.removeprefix("baton:1:worker:") for key in keys}


async def until_registered(port: int, workers: set[str]) -> None:
    async with asyncio.timeout(60):
        while await registered(port) != workers:
            await asyncio.sleep(0.05)


async def is_healthy(
    service: Mapping[str, Any], localhost: Localhost, own: str, image: Mapping[str, str]
) -> bool:
    """What the service's own health check says."""
    kind, *command = service["healthcheck"]["test"]
    assert kind == "CMD"
    process = await asyncio.create_subprocess_exec(
        *(localhost.text(part, own) for part in command),
        env={**image, **localhost.environment(service)},
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    return await process.wait() == 0


async def load_generated(gateway: str, folder: Path, image: Mapping[str, str]) -> None:
    """Profile bench: its own entrypoint, with a smaller load than its default, leaves both of its
    files."""
    bench = services_of("bench")["bench"]
    localhost = Localhost({}, {"gateway": gateway})
    target = bench["volumes"][0].split(":")[-1]
    given = (localhost.text(part) for part in bench["entrypoint"])
    load = ("--rate=50", "--num-requests=4", "--input-tokens=16", "--output-tokens=4")
    process = await asyncio.create_subprocess_exec(
        *(part.replace(f"={target}/", f"={folder}/") for part in given),
        *load,
        cwd=ROOT,
        env={**image, **localhost.environment(bench), "HOME": str(folder)},
        stdout=DEVNULL,
        stderr=PIPE,
    )
    _, told = await process.communicate()
    assert process.returncode == 0, told.decode()
    (point,) = json.loads((folder / "load.json").read_text())["points"]
    assert point["summary"]["num_complete"] == 4
    assert (folder / "load.png").read_bytes().startswith(b"\x89PNG")


def bring_kernels(home: Path) -> None:
    """The CPU kernels' library, which the image has beside their sources, and a new user's cache
    has not: compiling it takes each worker longer than all of the rest."""
    level = chosen_level()
    if level != NO_LEVEL:
        cache = home / ".cache" / "baton"
        cache.mkdir(mode=0o700, parents=True)
        library = find_or_build(level)
        (cache / library.name).symlink_to(library)


async def test_the_services_start_in_order_are_healthy_and_answer(
    tmp_path: Path, image_environment: dict[str, str]
) -> None:
    services = services_of("cpu")
    log: list[str] = []
    addresses = dict.fromkeys(services, "")
    children: list[Child] = []
    lifeline = os.pipe()
    for name in ("tmp", "kv", "results"):
        (tmp_path / name).mkdir()
    bring_kernels(tmp_path / "tmp")
    order = in_start_order(services)
    assert order.pop(0) == "redis"
    redis = services.pop("redis")
    async with AsyncExitStack() as stack:
        redis_port = await stack.enter_async_context(running_redis(redis["command"], tmp_path))
        addresses["redis"] = f"127.0.0.1:{redis_port}"
        # One host has each port once: where all containers tell metrics on one, here each has its
        # own.
        metrics_ports = dict(zip(order, free_ports(len(order)), strict=True))
        try:
            for name in order:
                localhost = world(tmp_path, services, addresses)
                service = services[name]
                verb, *arguments = localhost.command(service)
                spec = ChildSpec(name, (*entrypoint(), verb), tuple(arguments))
                environment = {
                    **image_environment,
                    **localhost.environment(service),
                    "BATON_METRICS_PORT": str(metrics_ports[name]),
                }
                # The way by which a supervisor learns a process's port is a flag before its own.
                child = Child(spec, lambda _, line: log.append(line), environment)
                children.append(child)
                report = await child.start(lifeline[0])
                addresses[name] = "127.0.0.1:" + report.address.rpartition(":")[2]
            localhost = world(tmp_path, services, addresses)
            await wait_until_serving(addresses["gateway"])
            for name, service in services.items():
                assert await is_healthy(service, localhost, addresses[name], image_environment), (
                    name
                )
                page = await fetch_metrics(metrics_ports[name])
                assert f'baton_tier="{service["command"][0]}"' in page
            # The registry lists each worker that the gateway names, by the name it advertises,
            # once.
            workers = {addresses["prefill"], addresses["decode"]}
            await until_registered(redis_port, workers)
            async with AsyncClient(addresses["gateway"], max_retries=0) as client:
                prompt = "def walk(path):\n" * 8
                answer = await client.generate(
                    prompt, model="baton-py-6m", max_tokens=8, ignore_eos=True
                )
                known = [worker.address for worker in (await client.model()).workers]
            assert sorted(known) == sorted(workers)
            assert answer.usage.completion_tokens == 8
            assert (answer.timing.prefill_worker, answer.timing.decode_worker) == (
                "prefill-0",
                "decode-0",
            )
            assert answer.timing.transfer_bytes > 0
            assert any(
                "KV goes over shm" in line and str(tmp_path / "kv") in line for line in log
            ), log
            await load_generated(addresses["gateway"], tmp_path / "results", image_environment)
            await children.pop().stop(30)
            assert not await is_healthy(
                services["gateway"], localhost, addresses["gateway"], image_environment
            )
        finally:
            await asyncio.gather(*(child.stop(30) for child in children))
            for fd in lifeline:
                os.close(fd)
        assert await registered(redis_port) == set()
    left = [path.name for path in (tmp_path / "kv").iterdir()]
    assert [name for name in left if not name.startswith("baton-memory-")] == []
