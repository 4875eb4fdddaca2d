"""Which processes `baton serve` needs, and with what options. Pure but for the number of cores,
which is given."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from baton.config import DecodeOptions, GatewayOptions, Options, PrefillOptions, ServeOptions
from baton.config.command import private_environment, to_arguments
from baton.config.load import build_options
from baton.errors import ConfigError

#: Has a folder for each GPU.
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")

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
    if options.colocated:
        return 0
    if options.prefill_devices and "num_prefill_workers" not in options.model_fields_set:
        return len(options.prefill_devices)
    return options.num_prefill_workers


def num_decode_workers(options: ServeOptions) -> int:
    if options.decode_devices and "num_decode_workers" not in options.model_fields_set:
        return len(options.decode_devices)
    return options.num_decode_workers


def num_visible_gpus(environment: Mapping[str, str], driver: Path = _NVIDIA_DRIVER) -> int:
    """GPUs that this process's children can be given, as NVIDIA's driver has them; 0 without
    it."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return sum(part.strip() not in ("", "-1") for part in named.split(","))
    return sum(1 for _ in driver.iterdir()) if driver.is_dir() else 0


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
    total = num_prefill_workers(options) * prefill + num_decode_workers(options) * decode
    return max(1, num_cores // total)


#: A worker's GPU, by number; None where --device says it all.
Gpu = int | None


def gpus_of_workers(
    options: ServeOptions, num_gpus: int
) -> tuple[tuple[Gpu, ...], tuple[Gpu, ...]]:
    """Of each prefill worker, and of each decode worker. num_gpus: that can be seen here.

    Raises ConfigError for one that cannot.
    """
    prefill, decode = options.prefill_devices, options.decode_devices
    for option, named in (("prefill_devices", prefill), ("decode_devices", decode)):
        if num_gpus and max(named, default=0) >= num_gpus:
            raise ConfigError.of(
                option, ",".join(map(str, named)), f"use 0 to {num_gpus - 1}: no others are here"
            )
    num_prefill, num_decode = num_prefill_workers(options), num_decode_workers(options)
    is_fixed = options.device not in ("auto", "cuda")
    if is_fixed or not (num_gpus > 1 or prefill or decode):
        return (None,) * num_prefill, (None,) * num_decode
    if not (prefill or decode):
        gpus = tuple(i % num_gpus for i in range(num_prefill + num_decode))
        return gpus[:num_prefill], gpus[num_prefill:]
    others = tuple(i for i in range(num_gpus) if i not in prefill + decode) or prefill + decode
    prefill, decode = prefill or others, decode or others
    return (
        tuple(prefill[i % len(prefill)] for i in range(num_prefill)),
        tuple(decode[i % len(decode)] for i in range(num_decode)),
    )


def describe_gpus(options: ServeOptions, num_gpus: int) -> str:
    """Who is on which GPU, in one line; empty where --device says it all."""
    tiers = zip(("prefill", "decode"), gpus_of_workers(options, num_gpus), strict=True)
    return ", ".join(
        f"{tier}-{i} on GPU {gpu}"
        for tier, gpus in tiers
        for i, gpu in enumerate(gpus)
        if gpu is not None
    )


def _memory_shares(
    options: ServeOptions, prefill: Sequence[Gpu], decode: Sequence[Gpu]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of each prefill worker, and of each decode worker, on these GPUs: those on one, or of a
    machine without, have together what all of them may take, since they start together."""
    total, of_prefill = options.gpu_memory_utilization, options.prefill_gpu_memory_utilization

    def shares(own: Sequence[Gpu], other: Sequence[Gpu], of_tier: float) -> tuple[float, ...]:
        return tuple(
            total / (own.count(gpu) + other.count(gpu))
            if of_prefill is None or gpu not in other
            else of_tier / own.count(gpu)
            for gpu in own
        )

    reserved = of_prefill or 0.0
    return shares(prefill, decode, reserved), shares(decode, prefill, total - reserved)


def plan_workers(
    options: ServeOptions,
    num_cores: int,
    programs: Programs = PROGRAMS,
    kv_secret: str = "",
    num_gpus: int = 0,
) -> tuple[ChildSpec, ...]:
    """The workers, prefill first, each on a free port of the loopback interface.

    kv_secret: they share it unless the options name another one; empty for none. Raises
    ConfigError.
    """
    threads = threads_per_rank(options, num_cores)
    prefill_ranks, decode_ranks = num_ranks(options)
    prefill_gpus, decode_gpus = gpus_of_workers(options, num_gpus)
    prefill_shares, decode_shares = _memory_shares(options, prefill_gpus, decode_gpus)
    prefill_size, decode_size = options.prefill_block_size, options.decode_block_size
    common = {}
    if kv_secret and options.kv_secret_file is None and options.kv_secret is None:
        common["kv_secret"] = SecretStr(kv_secret)
    of_prefill = common | _of_tier(options, prefill_size, prefill_ranks, threads)
    of_decode = common | _of_tier(options, decode_size, decode_ranks, threads)
    prefill = (
        _worker(PrefillOptions, options, programs.prefill, f"prefill-{i}", of_prefill, gpu, share)
        for i, (gpu, share) in enumerate(zip(prefill_gpus, prefill_shares, strict=True))
    )
    decode = (
        _worker(DecodeOptions, options, programs.decode, f"decode-{i}", of_decode, gpu, share)
        for i, (gpu, share) in enumerate(zip(decode_gpus, decode_shares, strict=True))
    )
    return (*prefill, *decode)


def _of_tier(
    options: ServeOptions,
    block_size: int | None,
    num_ranks: int,
    threads_per_rank: int,
) -> dict[str, Any]:
    """Options that all workers of a tier have."""
    return {
        "block_size": block_size or options.block_size,
        "tensor_parallel_size": num_ranks,
        "num_threads": options.num_threads or threads_per_rank * num_ranks,
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
        *(f"decode-{i}" for i in range(num_decode_workers(options))),
    )
    return options.metrics_port + names.index(name) if options.metrics_port else 0


def _worker(
    cls: type[Options],
    options: ServeOptions,
    program: tuple[str, ...],
    name: str,
    of_tier: Mapping[str, Any],
    gpu: Gpu,
    memory_share: float,
) -> ChildSpec:
    own = {
        **of_tier,
        "worker_id": name,
        "port": 0,
        "gpu_memory_utilization": memory_share,
    }
    if gpu is not None:
        own["device"] = f"cuda:{gpu}"
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
