"""A stand-in for each tier: listens on a port, and does what its model's name says. Run as
`fake_service.py ROLE ...`.

The model is a folder. The fake appends what happens to it to FOLDER/journal, and looks there for a
file FOLDER/NAME that says how to misbehave: "refuse", "refuse and stay", "crash", "hang" (at the
start), "deaf" (to signals), or, for the gateway, "refuse MODEL".
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from baton.config import DecodeOptions, GatewayOptions, Options, PrefillOptions
from baton.errors import ModelError
from baton.registry import PipeRegistry, WorkerAdded
from baton.service import OnReady, ReadyReport, main
from baton.start_log import report_phase


def _note(folder: Path, text: str) -> None:
    with (folder / "journal").open("a") as journal:
        journal.write(text + "\n")


def _journal(folder: Path) -> list[str]:
    path = folder / "journal"
    return path.read_text().splitlines() if path.exists() else []


def _name(options: Options) -> str:
    return getattr(options, "worker_id", None) or "gateway"


async def _hear_of_workers(folder: Path, registry: PipeRegistry) -> None:
    async for change in registry.changes():
        if isinstance(change, WorkerAdded):
            _note(folder, f"gateway heard {change.tier.name} {change.address}")
        else:
            _note(folder, f"gateway lost {change.address}")


async def _attend(
    folder: Path, options: GatewayOptions, stop: asyncio.Event
) -> asyncio.Task[None] | None:
    """What a gateway has to do with its supervisor: hear of workers, and say FOLDER/number."""
    hearing = None
    if options.workers_fd is not None:
        registry = PipeRegistry(options.workers_fd)
        hearing = asyncio.create_task(_hear_of_workers(folder, registry))
        await _until_first(registry.wait_complete(), stop.wait())
    if options.number_fd is not None:
        os.write(options.number_fd, (folder / "number").read_bytes())
    return hearing


async def _until_first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Return when one has ended. The others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def serve(
    options: PrefillOptions | DecodeOptions | GatewayOptions, stop: asyncio.Event, on_ready: OnReady
) -> None:
    """Pretend to serve."""
    folder, name = Path(options.model), _name(options)
    fault = folder / name
    how = fault.read_text() if fault.exists() else ""
    sys.stdout.write(f"{name} was here\n")
    sys.stdout.flush()
    if how == "refuse":
        raise ModelError("no such weights")
    if isinstance(options, GatewayOptions):
        names = [each.model_name for each in options.each_model()]
        _note(folder, f"gateway of {' '.join(names)}")
        if (name := how.removeprefix("refuse ")) in names:
            raise ModelError("no tokenizer", model=name)
        name = "gateway"
    if how == "refuse and stay":
        os.write(options.ready_fd or 0, b'{"error": "no such weights"}\n')
        await stop.wait()
    if how == "crash":
        sys.stderr.write("the last words\n")
        os._exit(3)
    if how == "hang":
        await stop.wait()
        return
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report_phase("listening")
    hearing: asyncio.Task[None] | None = None
    if how == "after gateway":
        async with asyncio.timeout(60):
            while not any(line.startswith("gateway started") for line in _journal(folder)):
                await asyncio.sleep(0.01)
    server = await asyncio.start_server(
        lambda _r, w: w.close(),
        options.host,
        options.port,
        reuse_port=getattr(options, "reuse_port", False),
    )
    host, port = server.sockets[0].getsockname()[:2]
    _note(folder, f"{name} started {os.getpid()}")
    if isinstance(options, GatewayOptions):
        hearing = await _attend(folder, options, stop)
    on_ready(ReadyReport(f"{host}:{port}", {"load": 0.25}))
    await stop.wait()
    if how == "deaf":
        await asyncio.Event().wait()
    server.close()
    await server.wait_closed()
    if hearing:
        hearing.cancel()
    _note(folder, f"{name} stopped")


if __name__ == "__main__":
    role = sys.argv[1]
    classes = {"prefill": PrefillOptions, "decode": DecodeOptions, "gateway": GatewayOptions}
    main(classes[role], serve, role, sys.argv[2:])
