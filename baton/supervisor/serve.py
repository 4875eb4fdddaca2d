"""The service behind `baton serve`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

from baton.config import ServeOptions
from baton.service import OnReady, ReadyReport, describe_phases
from baton.supervisor.cluster import Cluster, check_ports
from baton.supervisor.display import StartDisplay
from baton.supervisor.log_lines import write_if_possible

#: Default gateway address of clients.
_DEFAULT_ADDRESS = "127.0.0.1:50051"


async def serve_cluster(options: ServeOptions, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Start a gateway and workers of both tiers on this machine, and serve until stopped."""
    check_ports(options)
    display = StartDisplay()
    cluster = Cluster(options, on_line=display.on_line, on_phase=display.on_phase)
    starting = asyncio.create_task(cluster.start(), name="start")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            display.end()
            print_ready(options, cluster)
            on_ready(ReadyReport(cluster.address, cluster.phases))
            await stopping
    finally:
        display.end()
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await cluster.stop()


def print_ready(options: ServeOptions, cluster: Cluster) -> None:
    """Print to stdout: the addresses and what serves them, the start times, and commands to try."""
    defaults = cluster.report_of("gateway").sampling_defaults
    name = served_models(options, cluster)[0]
    lines = [
        f"Baton is ready at {cluster.address}: {'; '.join(describe_cluster(options, cluster))}",
        f"  started in {describe_start(cluster.phases)}",
        *([f"  sampling defaults of the model: {defaults}"] if defaults else []),
        f"  try: {example_command(options, cluster.address, name)}",
    ]
    if cluster.http_address:
        lines.append(f"  or:  {example_curl(options, cluster.http_address, name)}")
    write_if_possible(sys.stdout, "\n".join((*lines, "")))


def describe_cluster(options: ServeOptions, cluster: Cluster) -> list[str]:
    """Models, dtype and its reason, level of CPU kernels, and tiers; unknown parts are omitted."""
    workers = [name for name in cluster.names if not name.startswith("gateway")]
    parts = [" and ".join(served_models(options, cluster))]
    parts += dict.fromkeys(
        computing for name in workers if (computing := cluster.report_of(name).computing)
    )
    tiers = ("prefill", "decode", "gateway")
    counts = {tier: sum(name.startswith(tier) for name in cluster.names) for tier in tiers}
    parts.append(" + ".join(f"{count} {tier}" for tier, count in counts.items() if count))
    return parts


def served_models(options: ServeOptions, cluster: Cluster) -> list[str]:
    """Names of the models that were not refused."""
    names = (each.model_name for each in options.each_model())
    return [name for name in names if name not in cluster.refused_models]


def example_command(options: ServeOptions, address: str, name: str) -> str:
    """An example request that can be run on this machine as printed. name: of the model."""
    reachable = _reachable(address)
    where = "" if reachable == _DEFAULT_ADDRESS else f" --address {reachable}"
    tls = f" --ssl-ca-certs {options.ssl_ca_certs}" if options.ssl_ca_certs else ""
    model = f" --model {name}" if options.more_models else ""
    return f"baton generate 'def fibonacci(n):' --timing{model}{where}{tls}"


def example_curl(options: ServeOptions, address: str, name: str) -> str:
    """The same request for OpenAI's HTTP API."""
    scheme = "https" if options.tls else "http"
    tls = f" --cacert {options.ssl_ca_certs}" if options.ssl_ca_certs else ""
    key = " -H 'authorization: Bearer KEY'" if options.api_key or options.api_key_file else ""
    model = f'"model": "{name}", ' if options.more_models else ""
    body = f'{{{model}"prompt": "def fibonacci(n):", "max_tokens": 64}}'
    url = f"{scheme}://{_reachable(address)}/v1/completions"
    return f"curl {url}{tls}{key} -H 'content-type: application/json' -d '{body}'"


def _reachable(address: str) -> str:
    """Replace a wildcard address by one that this machine can call."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]") else address


def describe_start(phases: Mapping[str, float]) -> str:
    """Format Cluster.phases, each child with its own phases: "decode-0 2.1 s (load 1.9 s), total
    3.0 s"."""
    parts = []
    for name, seconds in phases.items():
        if " " in name:
            continue
        own = {
            phase.removeprefix(f"{name} "): spent
            for phase, spent in phases.items()
            if phase.startswith(f"{name} ")
        }
        shown = describe_phases({name: seconds})
        parts.append(f"{shown} ({describe_phases(own)})" if own else shown)
    return ", ".join(parts)
