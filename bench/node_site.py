"""A gateway, a registry, a worker of two hosts for each tier, and a decode worker of one host, each
on hosts of bench.namespaces; workers are started again as an orchestrator does."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.namespaces import Host, Wire, make_bridge, wire_between
from tests.support.redis_server import redis_executable

_NETWORK = "10.77.0"
_PORT, _REDIS_PORT = 50051, 6379
#: Seconds after the first end of a worker's processes within which the others have to end, and the
#: time until it is started again.
ENDS_S = 8.0
_BATON = (sys.executable, "-P", "-m", "baton")


@dataclass(frozen=True, slots=True)
class SiteOptions:
    """rate: of each host, as tc writes it. prefill_cut, decode_cut: tensor or pipeline."""

    model: str
    log_dir: Path
    kv_transport: str = "tcp"
    prefill_cut: str = "tensor"
    decode_cut: str = "pipeline"
    rate: str = "1gbit"
    kv_memory: str = "96MiB"


class NodeWorker:
    """A worker, its hosts, and their processes. When one process ends, the others have ENDS_S to
    follow; then all are started again."""

    def __init__(
        self, name: str, hosts: Sequence[Host], commands: Sequence[Sequence[str]], log_dir: Path
    ) -> None:
        self.name = name
        self.hosts = tuple(hosts)
        self._commands = commands
        self._log_dir = log_dir
        self._ends: dict[Host, float] = {}
        self._has_ended = asyncio.Condition()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {name}")

    async def until_ended(self, hosts: Sequence[Host], timeout_s: float) -> float | None:
        """The time at which the processes of these hosts have ended, since this is called; None if
        they have not within the timeout."""
        self._ends.clear()
        try:
            async with asyncio.timeout(timeout_s), self._has_ended:
                await self._has_ended.wait_for(lambda: all(host in self._ends for host in hosts))
        except TimeoutError:
            return None
        return max(self._ends[host] for host in hosts)

    async def stop(self) -> None:
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            pairs = zip(self.hosts, self._commands, strict=True)
            processes = [
                await start(host, command, self._log_dir / f"{host.name}.log")
                for host, command in pairs
            ]
            waiting = [
                asyncio.create_task(self._wait(*each))
                for each in zip(self.hosts, processes, strict=True)
            ]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait(waiting, timeout=ENDS_S)
            finally:
                for host in self.hosts:
                    host.signal(signal.SIGKILL)
            await asyncio.wait(waiting)

    async def _wait(self, host: Host, process: Process) -> None:
        await process.wait()
        async with self._has_ended:
            self._ends.setdefault(host, time.monotonic())
            self._has_ended.notify_all()


async def start(host: Host, command: Sequence[str], log: Path) -> Process:
    """Start a command on a host, with its output added to a file."""
    with log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *host.command(*command), stdin=DEVNULL, stdout=file, stderr=file
        )


@dataclass(frozen=True, slots=True)
class Site:
    """workers: prefill and decode of two hosts each, and spare. wires: by their hosts' names."""

    address: str
    hosts: Mapping[str, Host]
    workers: Mapping[str, NodeWorker]
    wires: Mapping[tuple[str, str], Wire]

    @property
    def num_workers(self) -> int:
        return len(self.workers)


#: Hosts with ranks. Wires are between the hosts of each worker, and from each prefill host to each
#: decode host.
_PREFILL, _DECODE, _SPARE = ("prefill0", "prefill1"), ("decode0", "decode1"), ("spare",)
_OTHERS = ("redis", "gateway")


@asynccontextmanager
async def site_of(options: SiteOptions) -> AsyncIterator[Site]:
    """Make the hosts, and start all processes; workers may not be ready yet."""
    make_bridge(f"{_NETWORK}.1/24")
    with ExitStack() as stack:
        hosts = {}
        for number, name in enumerate((*_PREFILL, *_DECODE, *_SPARE, *_OTHERS), 2):
            hosts[name] = Host(name, f"{_NETWORK}.{number}/24", options.rate)
            stack.callback(hosts[name].close)
        pairs = (_PREFILL, _DECODE, *product(_PREFILL, (*_DECODE, *_SPARE)))
        wires = {}
        for number, (one, other) in enumerate(pairs):
            wires[one, other] = wire_between(f"wire{number}", hosts[one], hosts[other])
            stack.callback(wires[one, other].close)
        secret = options.log_dir / "secret"
        secret.write_text(secrets.token_hex(32))
        registry = f"redis://{hosts['redis'].address}:{_REDIS_PORT}/0"
        workers: dict[str, NodeWorker] = {}
        others: list[Process] = []
        try:
            log = options.log_dir / "redis.log"
            others.append(await start(hosts["redis"], _redis(hosts["redis"]), log))
            for tier, names, cut in (
                ("prefill", _PREFILL, options.prefill_cut),
                ("decode", _DECODE, options.decode_cut),
                ("spare", _SPARE, ""),
            ):
                own = [hosts[name] for name in names]
                commands = [
                    _worker(options, tier, own, rank, cut, registry) for rank in range(len(own))
                ]
                workers[tier] = NodeWorker(tier, own, commands, options.log_dir)
            gateway = hosts["gateway"]
            command = (
                *(*_BATON, "gateway", f"--host={gateway.address}", f"--port={_PORT}"),
                *("--insecure", "--no-enable-http", f"--registry={registry}", "--", options.model),
            )
            others.append(await start(gateway, command, options.log_dir / "gateway.log"))
            yield Site(f"{gateway.address}:{_PORT}", hosts, workers, wires)
        finally:
            for worker in workers.values():
                await worker.stop()
            for process in others:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def _worker(
    options: SiteOptions, tier: str, hosts: Sequence[Host], rank: int, cut: str, registry: str
) -> tuple[str, ...]:
    """Command of a worker's host."""
    host = hosts[rank]
    nodes = (
        *(f"--nnodes={len(hosts)}", f"--node-rank={rank}", f"--master-addr={hosts[0].address}"),
        *(f"--{cut}-parallel-size={len(hosts)}", "--nodes-timeout-s=120"),
    )
    is_prefill = tier == "prefill"
    own = ("--block-size=32",) if is_prefill else ("--block-size=8", "--max-local-prefill-tokens=0")
    return (
        *(*_BATON, "prefill" if is_prefill else "decode", f"--worker-id={tier}"),
        *(f"--host={host.address}", f"--port={_PORT}", f"--kv-host={host.address}", "--insecure"),
        *(f"--kv-secret-file={options.log_dir / 'secret'}", f"--registry={registry}"),
        *(f"--kv-transport={options.kv_transport}", "--dtype=float32", "--num-threads=2"),
        *(f"--kv-cache-memory-bytes={options.kv_memory}", "--max-num-batched-tokens=64"),
        *own,
        *(nodes if len(hosts) > 1 else ()),
        *("--", options.model),
    )


def _redis(host: Host) -> tuple[str, ...]:
    """Redis, which keeps nothing. Raises RuntimeError without a redis-server."""
    return (
        *(redis_executable(), "--port", str(_REDIS_PORT), "--bind", host.address),
        *("--protected-mode", "no", "--save", "", "--appendonly", "no"),
    )
