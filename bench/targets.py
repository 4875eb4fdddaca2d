"""What is measured: a gateway that runs already, or clusters of this machine started for the
purpose."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.config.load import load_options
from baton.supervisor import Cluster

SPLIT, COLOCATED, GIVEN = "split", "colocated", "given"


def cluster_options(
    model: str, settings: Mapping[str, object], compares: bool
) -> dict[str, ServeOptions]:
    """Options of `baton serve` for each target, by its name. Raises ConfigError.

    settings: options by field name, as a YAML file of `baton serve` holds them. compares: whether
    the same number of workers is measured colocated, too.
    """
    base: dict[str, object] = {"log_level": "warning", **settings, "model": model, "port": 0}
    if not compares:
        options = load_options(ServeOptions, base)
        return {COLOCATED if options.colocated else SPLIT: options}
    split = load_options(ServeOptions, {**base, "colocated": False})
    only_split = {"num_prefill_workers", "prefill_block_size"}
    alone = {name: value for name, value in base.items() if name not in only_split}
    num_workers = split.num_prefill_workers + split.num_decode_workers
    colocated = load_options(
        ServeOptions, {**alone, "colocated": True, "num_decode_workers": num_workers}
    )
    return {SPLIT: split, COLOCATED: colocated}


@asynccontextmanager
async def started(clusters: Mapping[str, ServeOptions]) -> AsyncIterator[dict[str, AsyncClient]]:
    """Start the clusters, one after the other, and yield a client of each, by name. Raises
    StartupError."""
    async with AsyncExitStack() as stack:
        clients = {}
        for name, options in clusters.items():
            cluster = await stack.enter_async_context(Cluster(options))
            clients[name] = await stack.enter_async_context(AsyncClient(cluster.address))
        yield clients


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[dict[str, AsyncClient]]:
    """A client of a gateway that runs already."""
    async with AsyncClient(address) as client:
        yield {GIVEN: client}
