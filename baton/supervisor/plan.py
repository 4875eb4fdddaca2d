"""Which processes `baton serve` needs, and with what options. Pure but for the number of cores,
which is given."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import SecretStr

from baton.config import DecodeOptions, GatewayOptions, Options, PrefillOptions, ServeOptions
from baton.config.command import private_environment, to_arguments
from baton.config.load import build_options

#: Options of `baton serve` that are about its own process, or that each child gets a value of its
#: own for.
_NOT_PASSED_ON = frozenset({"host", "port", "http_port", "ready_fd", "parent_fd", "metrics_port"})


@dataclass(frozen=True, slots=True)
class Programs:
    """What is executed for each role, before its arguments."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    gateway: tuple[str, ...]


def _module(name: str) -> tuple[str, ...]:
    """-P keeps folders of the caller's directory, which may bear any name, out of the import
    path."""
    return (sys.executable, "-P", "-m", name)


PROGRAMS = Programs(_module("prefill_svc"), _module("decode_svc"), _module("gateway"))


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: its name in logs, the program, the program's arguments, and what no command line
    may show."""

    name: str
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def at_ports(self, ports: Mapping[str, int]) -> ChildSpec:
        """The same process on ports of its own, by option, which go before earlier ones."""
        flags = {f"--{name}": port for name, port in ports.items()}
        kept = (part for part in self.arguments if part.partition("=")[0] not in flags)
        return replace(self, arguments=(*(f"{flag}={port}" for flag, port in flags.items()), *kept))


def num_prefill_workers(options: ServeOptions) -> int:
    return 0 if options.colocated else options.num_prefill_workers


def num_ranks(options: ServeOptions) -> tuple[int, int]:
    """Processes that share the model in each prefill worker, and in each decode worker."""
    size = options.tensor_parallel_size
    return (
        options.prefill_tensor_parallel_size or size,
        options.decode_tensor_parallel_size or size,
    )


def threads_per_rank(options: ServeOptions, num_cores: int) -> int:
    """CPU threads of each rank of each engine: an equal part of the cores, so that together they do
    not exceed them."""
    prefill, decode = num_ranks(options)
    total = num_prefill_workers(options) * prefill + options.num_decode_workers * decode
    return max(1, num_cores // total)


def memory_shares(options: ServeOptions) -> tuple[float, float]:
    """Shares of the free memory of each prefill worker, and of each decode worker: together what
    all of them may take, since they start together."""
    num_prefill, num_decode = num_prefill_workers(options), options.num_decode_workers
    total, of_prefill = options.gpu_memory_utilization, options.prefill_gpu_memory_utilization
    if of_prefill is None:
        share = total / (num_prefill + num_decode)
        return share, share
    return of_prefill / num_prefill, (total - of_prefill) / num_decode


def plan_workers(
    options: ServeOptions, num_cores: int, programs: Programs = PROGRAMS, kv_secret: str = ""
) -> tuple[ChildSpec, ...]:
    """The workers, prefill first, each on a free port of the loopback interface.

    kv_secret: they share it unless the options name another one; empty for none.
    """
    threads = threads_per_rank(options, num_cores)
    prefill_ranks, decode_ranks = num_ranks(options)
    prefill_share, decode_share = memory_shares(options)
    prefill_size, decode_size = options.prefill_block_size, options.decode_block_size
    common = {}
    if kv_secret and options.kv_secret_file is None and options.kv_secret is None:
        common["kv_secret"] = SecretStr(kv_secret)
    of_prefill = common | _of_tier(options, prefill_size, prefill_ranks, threads, prefill_share)
    of_decode = common | _of_tier(options, decode_size, decode_ranks, threads, decode_share)
    prefill = (
        _worker(PrefillOptions, options, programs.prefill, f"prefill-{i}", of_prefill)
        for i in range(num_prefill_workers(options))
    )
    decode = (
        _worker(DecodeOptions, options, programs.decode, f"decode-{i}", of_decode)
        for i in range(options.num_decode_workers)
    )
    return (*prefill, *decode)


def _of_tier(
    options: ServeOptions,
    block_size: int | None,
    num_ranks: int,
    threads_per_rank: int,
    memory_share: float,
) -> dict[str, Any]:
    """Options that all workers of a tier have."""
    return {
        "block_size": block_size or options.block_size,
        "tensor_parallel_size": num_ranks,
        "num_threads": options.num_threads or threads_per_rank * num_ranks,
        "gpu_memory_utilization": memory_share,
    }


def plan_gateways(options: ServeOptions, programs: Programs = PROGRAMS) -> tuple[ChildSpec, ...]:
    """The gateways, all on the first one's ports. They start beside the workers, whose addresses
    they read on stdin."""
    own: dict[str, Any] = {"host": options.host, "port": options.port, "workers_fd": 0}
    if options.bound_http_port is not None:
        own["http_port"] = options.bound_http_port
    if options.num_gateways > 1:
        own["reuse_port"] = True
    names = ("gateway", *(f"gateway-{i}" for i in range(1, options.num_gateways)))
    return tuple(_child(GatewayOptions, options, programs.gateway, name, own) for name in names)


def metrics_port(options: ServeOptions, name: str) -> int:
    """The Prometheus port of the child of that name: consecutive ones for gateways, prefill and
    decode workers. 0: none.

    Raises ValueError for a name that no child has.
    """
    names = (
        "gateway",
        *(f"gateway-{i}" for i in range(1, options.num_gateways)),
        *(f"prefill-{i}" for i in range(num_prefill_workers(options))),
        *(f"decode-{i}" for i in range(options.num_decode_workers)),
    )
    return options.metrics_port + names.index(name) if options.metrics_port else 0


def _worker(
    cls: type[Options],
    options: ServeOptions,
    program: tuple[str, ...],
    name: str,
    of_tier: Mapping[str, Any],
) -> ChildSpec:
    own = {
        **of_tier,
        "worker_id": name,
        "port": 0,
    }
    return _child(cls, options, program, name, own)


def _child(
    cls: type[Options],
    options: ServeOptions,
    program: tuple[str, ...],
    name: str,
    own: Mapping[str, Any],
) -> ChildSpec:
    """`own` options go before those passed on, which are the ones that somebody set."""
    passed_on = {
        option: getattr(options, option)
        for option in cls.model_fields
        if option in options.model_fields_set and option not in _NOT_PASSED_ON
    }
    port = metrics_port(options, name)
    metrics = {"metrics_port": port} if port else {}
    child_options = build_options(cls, {**passed_on, **metrics, **own})
    arguments = tuple(to_arguments(child_options))
    return ChildSpec(name, program, arguments, private_environment(child_options))
