"""A worker on several hosts: from options to the nodes of its engine, and the process of a node
other than 0."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable

from baton.config import EngineOptions, WorkerOptions
from baton.config.worker_options import PrefillTierOptions
from baton.errors import ConfigError
from baton.service import ReadyReport
from baton.start_log import PhaseClock
from engine.checkpoint import naming_model, resolve_checkpoint
from engine.ranks.mesh import Degrees
from engine.ranks.nodes import ONE_NODE, Nodes
from kv_transfer.kv_secret import KvSecret, read_kv_secret

_log = logging.getLogger(__name__)


def kv_secret_of(options: WorkerOptions) -> KvSecret | None:
    """The secret of all workers. Raises ConfigError."""
    if options.kv_secret is None:
        return read_kv_secret(options.kv_secret_file)
    try:
        return KvSecret(options.kv_secret.get_secret_value().encode())
    except ValueError as error:
        raise ConfigError.of("kv_secret", "***", f"{error}; give openssl rand -hex 32") from None


def degrees_of(options: EngineOptions) -> Degrees:
    """How the engine is divided over its ranks."""
    context = options.context_parallel_size if isinstance(options, PrefillTierOptions) else 1
    return Degrees(
        options.tensor_parallel_size,
        options.pipeline_parallel_size,
        context * options.data_parallel_size,
        options.enable_expert_parallel,
        options.tensor_parallel_cut,
        options.data_parallel_size > 1,
    )


def nodes_of(options: EngineOptions) -> Nodes:
    """The hosts that run the engine. Raises ConfigError."""
    if not isinstance(options, WorkerOptions) or options.nnodes == 1:
        return ONE_NODE
    secret = kv_secret_of(options)
    return Nodes(
        options.nnodes,
        options.master_addr,
        options.master_port,
        options.nodes_timeout_s,
        b"" if secret is None else secret.node_key,
    )


async def serve_node(
    options: WorkerOptions, stop: asyncio.Event, on_ready: Callable[[ReadyReport], None]
) -> None:
    """Run the ranks of a node other than 0 until node 0 ends them. `stop` ends the waiting for node
    0 only: node 0 needs the ranks to finish what runs. Raises StartupError."""
    # Only a process that computes with a model pays for importing torch.
    from engine.ranks.node_agent import NodeAgent, wait_for
    from engine.ranks.team import end_process

    clock, cancelled = PhaseClock(), threading.Event()
    with naming_model(options.model):
        folder = resolve_checkpoint(options.model, options.revision)
    agent = NodeAgent(nodes_of(options), options.node_rank, degrees_of(options), folder)
    watching = asyncio.create_task(_set_after(stop, cancelled))
    try:
        ranks = await asyncio.to_thread(agent.join, cancelled)
    finally:
        watching.cancel()
    clock.lap("join")
    on_ready(ReadyReport("", clock.phases))
    name = f"node {options.node_rank} of {options.nnodes}"
    if reason := await asyncio.to_thread(wait_for, ranks):
        end_process(f"{name}: {reason}")
    _log.info("%s: node 0 has ended, and so does this node", name)
    # Nothing is left to close; the interpreter's own end takes seconds on a busy machine.
    os._exit(0)


async def _set_after(stop: asyncio.Event, cancelled: threading.Event) -> None:
    await stop.wait()
    cancelled.set()
