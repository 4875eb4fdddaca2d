"""compose.yaml's own commands and environments, as processes of this host, answer a request."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.client import AsyncClient
from baton.supervisor import ChildSpec
from baton.supervisor.child import Child
from baton.supervisor.serving import wait_until_serving
from tests.support.compose_file import ROOT, Localhost, entrypoint, services_of

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
        for volume in told["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                mounts[target] = str((ROOT / source).resolve())
    return Localhost(mounts, addresses)


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


async def test_the_services_start_in_order_are_healthy_and_answer(
    tmp_path: Path, image_environment: dict[str, str]
) -> None:
    services = services_of("cpu")
    log: list[str] = []
    addresses = dict.fromkeys(services, "")
    children: list[Child] = []
    lifeline = os.pipe()
    for name in ("tmp", "kv"):
        (tmp_path / name).mkdir()
    try:
        for name in in_start_order(services):
            localhost = world(tmp_path, services, addresses)
            service = services[name]
            verb, *arguments = localhost.command(service)
            spec = ChildSpec(name, (*entrypoint(), verb), tuple(arguments))
            environment = {**image_environment, **localhost.environment(service)}
            # The way by which a supervisor learns a process's port is a flag before its own.
            child = Child(spec, lambda _, line: log.append(line), environment)
            children.append(child)
            report = await child.start(lifeline[0])
            addresses[name] = "127.0.0.1:" + report.address.rpartition(":")[2]
        localhost = world(tmp_path, services, addresses)
        await wait_until_serving(addresses["gateway"])
        for name, service in services.items():
            assert await is_healthy(service, localhost, addresses[name], image_environment), name
        async with AsyncClient(addresses["gateway"]) as client:
            prompt = "def walk(path):\n" * 8
            answer = await client.generate(
                prompt, model="baton-py-6m", max_tokens=8, ignore_eos=True
            )
        assert answer.usage.completion_tokens == 8
        assert (answer.timing.prefill_worker, answer.timing.decode_worker) == (
            "prefill-0",
            "decode-0",
        )
        assert answer.timing.transfer_bytes > 0
        assert any("KV goes over shm" in line and str(tmp_path / "kv") in line for line in log), log
        await children.pop().stop(30)
        assert not await is_healthy(
            services["gateway"], localhost, addresses["gateway"], image_environment
        )
    finally:
        await asyncio.gather(*(child.stop(30) for child in children))
        for fd in lifeline:
            os.close(fd)
    assert list((tmp_path / "kv").iterdir()) == []
