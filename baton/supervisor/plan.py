"""Processes of `baton serve` and their options. Pure; the number of cores is a parameter."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from baton.config import DecodeOptions, GatewayOptions, Options, PrefillOptions, ServeOptions
from baton.config.command import private_environment, to_arguments
from baton.config.load import build_options
from baton.config.named_models import named_model
from baton.errors import ConfigError

#: Contains a directory for each GPU.
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")

#: Options of `baton serve` itself, and those with a separate value for each child.
_NOT_PASSED_ON = frozenset({"host", "port", "http_port", "ready_fd", "parent_fd", "metrics_port"})


@dataclass(frozen=True, slots=True)
class Programs:
    """Command of each role, before its arguments."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    gateway: tuple[str, ...]


def _module(name: str) -> tuple[str, ...]:
    """Uses -P, so that no directory of the caller's working directory shadows a module."""
    return (sys.executable, "-P", "-m", name)


PROGRAMS = Programs(_module("prefill_svc"), _module("decode_svc"), _module("gateway"))


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: name in logs, program, arguments, and secret values, which no command line may
    show. model: the name of a worker's model; empty for gateways. cpu_threads: of a worker that
    computes on the CPU and may be kept to any NUMA node; 0 for others. starts_later: once the
    planner wants it."""

    name: str
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    model: str = ""
    cpu_threads: int = 0
    starts_later: bool = False

    def without_models(self, names: Sequence[str]) -> ChildSpec:
        """The same gateway without some of its models."""
        refused = (f"--refused-models={','.join(names)}",) if names else ()
        return replace(self, arguments=(*refused, *self.arguments))

    def at_ports(self, ports: Mapping[str, int]) -> ChildSpec:
        """The same process with ports of its own, by option; they override earlier ones."""
        flags = {f"--{name}": port for name, port in ports.items()}
        kept = (part for part in self.arguments if part.partition("=")[0] not in flags)
        return replace(self, arguments=(*(f"{flag}={port}" for flag, port in flags.items()), *kept))


def num_prefill_workers(options: ServeOptions) -> int:
    """Prefill workers per model."""
    if options.colocated:
        return 0
    if options.prefill_devices and "num_prefill_workers" not in options.model_fields_set:
        return len(options.prefill_devices)
    return options.num_prefill_workers


def num_decode_workers(options: ServeOptions) -> int:
    """Decode workers per model, with those that start later."""
    return _num_decode_at_start(options) + _num_later_workers(options)


def _num_decode_at_start(options: ServeOptions) -> int:
    if options.decode_devices and "num_decode_workers" not in options.model_fields_set:
        return len(options.decode_devices)
    return options.num_decode_workers


def _num_later_workers(options: ServeOptions) -> int:
    """Decode workers of a model that start once the planner wants them. Cores, GPUs and memory are
    divided as if they were there."""
    if options.max_workers is None:
        return 0
    num_at_start = num_prefill_workers(options) + _num_decode_at_start(options)
    return max(0, options.max_workers - num_at_start)


def num_visible_gpus(environment: Mapping[str, str], driver: Path = _NVIDIA_DRIVER) -> int:
    """GPUs available to child processes, counted by NVIDIA's driver; 0 without the driver."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return sum(part.strip() not in ("", "-1") for part in named.split(","))
    return sum(1 for _ in driver.iterdir()) if driver.is_dir() else 0


def degrees_of(options: ServeOptions, tier: str) -> dict[str, int]:
    """Degrees of parallelism of each worker of a tier, prefill or decode, by option."""
    shared = ("tensor_parallel_size", "pipeline_parallel_size")
    own = {name: getattr(options, f"{tier}_{name}") or getattr(options, name) for name in shared}
    own["data_parallel_size"] = options.data_parallel_size
    if tier == "prefill":
        own["context_parallel_size"] = options.context_parallel_size
    return own


def num_ranks(options: ServeOptions) -> tuple[int, int]:
    """Ranks (processes that share the model) of each prefill worker and of each decode worker."""
    prefill, decode = degrees_of(options, "prefill"), degrees_of(options, "decode")
    return prod(prefill.values()), prod(decode.values())


def threads_per_rank(options: ServeOptions, num_cores: int) -> int:
    """CPU threads of each rank: an equal share of the cores."""
    total = 0
    for each in options.each_model():
        prefill, decode = num_ranks(each)
        total += num_prefill_workers(each) * prefill + num_decode_workers(each) * decode
    return max(1, num_cores // total)


#: Values of --device that a GPU's number replaces.
_ON_GPUS = ("auto", "cuda")
#: A worker's GPU by number; None if --device decides.
Gpu = int | None


def gpus_of_workers(
    options: ServeOptions, num_gpus: int
) -> tuple[tuple[Gpu, ...], tuple[Gpu, ...]]:
    """The first GPU of each prefill worker and of each decode worker, model by model; further ranks
    have those after it. num_gpus: available here.

    Raises ConfigError for a GPU that is not available, and for ranks without one of their own.
    """
    prefill, decode = options.prefill_devices, options.decode_devices
    for option, named in (("prefill_devices", prefill), ("decode_devices", decode)):
        if num_gpus and max(named, default=0) >= num_gpus:
            raise ConfigError.of(
                option, ",".join(map(str, named)), f"use 0 to {num_gpus - 1}: no others are here"
            )
    prefill_of, decode_of = _models_of_workers(options)
    if not (num_gpus > 1 or prefill or decode):
        return (None,) * len(prefill_of), (None,) * len(decode_of)
    tiers = [0] * len(prefill_of) + [1] * len(decode_of)
    sizes = [
        num_ranks(each)[tier] if each.device in _ON_GPUS else 1
        for tier, each in zip(tiers, prefill_of + decode_of, strict=True)
    ]
    if not (prefill or decode):
        gpus = [i % num_gpus for i in accumulate(sizes[:-1], initial=0)]
        if max(sizes) > 1 and sum(sizes) > num_gpus:
            raise ConfigError.of(
                "device",
                options.device,
                f"the workers have {sum(sizes)} ranks, each with a GPU of its own, and {num_gpus} "
                "GPUs are here; give fewer, or cpu",
            )
    else:
        others = tuple(i for i in range(num_gpus) if i not in prefill + decode) or prefill + decode
        prefill, decode = prefill or others, decode or others
        gpus = [prefill[i % len(prefill)] for i in range(len(prefill_of))]
        gpus += [decode[i % len(decode)] for i in range(len(decode_of))]
        _check_named(options, gpus, sizes, num_gpus)
    spread = tuple(
        gpu if each.device in _ON_GPUS else None
        for gpu, each in zip(gpus, prefill_of + decode_of, strict=True)
    )
    return spread[: len(prefill_of)], spread[len(prefill_of) :]


def _check_named(
    options: ServeOptions, gpus: Sequence[int], sizes: Sequence[int], num_gpus: int
) -> None:
    """Raise ConfigError if a worker of several ranks, which has sizes[i] GPUs from gpus[i] on,
    shares one with another, or needs one that is not here. num_gpus: 0 if unknown."""
    if max(sizes) == 1:
        return
    counts = Counter(gpu + i for gpu, size in zip(gpus, sizes, strict=True) for i in range(size))
    for gpu, count in sorted(counts.items()):
        is_missing = 0 < num_gpus <= gpu
        if count > 1 or is_missing:
            option = "prefill_devices" if options.prefill_devices else "decode_devices"
            what = "is not here" if is_missing else f"would have {count} ranks"
            raise ConfigError.of(
                option,
                ",".join(map(str, getattr(options, option))),
                f"a worker's ranks have GPUs from its first on, and GPU {gpu} {what}; name GPUs of "
                "both tiers that are as far apart as a worker has ranks",
            )


def _models_of_workers(options: ServeOptions) -> tuple[list[ServeOptions], list[ServeOptions]]:
    """Options of each prefill worker's and of each decode worker's model."""
    models = options.each_model()
    return (
        [each for each in models for _ in range(num_prefill_workers(each))],
        [each for each in models for _ in range(num_decode_workers(each))],
    )


def describe_gpus(options: ServeOptions, num_gpus: int) -> str:
    """One line with the workers on each GPU; empty if --device decides."""
    tiers = zip(("prefill", "decode"), gpus_of_workers(options, num_gpus), strict=True)
    return ", ".join(
        f"{tier}-{i} on GPU {gpu}"
        for tier, gpus in tiers
        for i, gpu in enumerate(gpus)
        if gpu is not None
    )


def _memory_shares(
    options: ServeOptions, prefill: Sequence[Gpu | str], decode: Sequence[Gpu | str]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Memory share of each prefill worker and of each decode worker. Workers in one place, a GPU or
    a machine without GPUs, split the configured share, since they start together."""
    total, of_prefill = options.gpu_memory_utilization, options.prefill_gpu_memory_utilization

    def shares(
        own: Sequence[Gpu | str], other: Sequence[Gpu | str], of_tier: float
    ) -> tuple[float, ...]:
        return tuple(
            total / (own.count(place) + other.count(place))
            if of_prefill is None or place not in other
            else of_tier / own.count(place)
            for place in own
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

    kv_secret: shared by all, unless the options name another one; empty for none. Raises
    ConfigError.
    """
    threads = threads_per_rank(options, num_cores)
    prefill_of, decode_of = _models_of_workers(options)
    prefill_gpus, decode_gpus = gpus_of_workers(options, num_gpus)
    prefill_shares, decode_shares = _memory_shares(
        options, _places(prefill_gpus, prefill_of), _places(decode_gpus, decode_of)
    )
    common = {}
    if kv_secret and options.kv_secret_file is None and options.kv_secret is None:
        common["kv_secret"] = SecretStr(kv_secret)

    def worker(
        cls: type[Options], name: str, each: ServeOptions, gpu: Gpu, share: float
    ) -> ChildSpec:
        tier = name.partition("-")[0]
        is_prefill, degrees = tier == "prefill", degrees_of(each, tier)
        loads = each.expert_load_file
        num_threads = each.num_threads or threads * prod(degrees.values())
        is_on_cpu = gpu is None and (each.device == "cpu" or not num_gpus)
        own = {
            **common,
            "block_size": getattr(each, f"{tier}_block_size") or each.block_size,
            **degrees,
            "num_threads": num_threads,
            "worker_id": name,
            "port": 0,
            "gpu_memory_utilization": share,
            **({} if gpu is None else {"device": f"cuda:{gpu}"}),
            **({"kv_disk_dir": str(Path(each.kv_disk_dir, name))} if each.kv_disk_dir else {}),
            **({"expert_load_file": _own_file(loads, name)} if loads else {}),
            **_metrics_port_of(options, name),
        }
        program = programs.prefill if is_prefill else programs.decode
        return replace(
            _child(cls, each, program, name, own),
            model=each.model_name,
            cpu_threads=num_threads if is_on_cpu and each.numa_node is None else 0,
        )

    prefill = zip(prefill_of, prefill_gpus, prefill_shares, strict=True)
    decode = zip(decode_of, decode_gpus, decode_shares, strict=True)
    are_later = (
        number >= _num_decode_at_start(each)
        for each in options.each_model()
        for number in range(num_decode_workers(each))
    )
    return (
        *(worker(PrefillOptions, f"prefill-{i}", *of_one) for i, of_one in enumerate(prefill)),
        *(
            replace(worker(DecodeOptions, f"decode-{i}", *of_one), starts_later=is_later)
            for i, (of_one, is_later) in enumerate(zip(decode, are_later, strict=True))
        ),
    )


def _own_file(path: Path, name: str) -> Path:
    """A worker's file beside those of others."""
    return path.with_name(f"{path.stem}-{name}{path.suffix}")


def _places(gpus: Sequence[Gpu], models: Sequence[ServeOptions]) -> list[Gpu | str]:
    """Where each worker's memory is: a GPU's number, or the value of --device."""
    return [each.device if gpu is None else gpu for gpu, each in zip(gpus, models, strict=True)]


def plan_gateways(options: ServeOptions, programs: Programs = PROGRAMS) -> tuple[ChildSpec, ...]:
    """The gateways, all on the ports of the first one. They start together with the workers and
    read the workers' addresses from stdin."""
    own: dict[str, Any] = {"host": options.host, "port": options.port, "workers_fd": 0}
    if options.bound_http_port is not None:
        own["http_port"] = options.bound_http_port
    if options.num_gateways > 1:
        own["reuse_port"] = True
    models = [named_model(text) for text in options.more_models]
    names = ("gateway", *(f"gateway-{i}" for i in range(1, options.num_gateways)))
    # They have no lease: the first one plans.
    is_planned = options.planner == "on"
    bounds = {"min_workers", "max_workers"}

    def gateway(number: int, name: str) -> ChildSpec:
        left_out = bounds if is_planned and number else set()
        kept = (GatewayOptions.own_options - left_out).__contains__
        own["more_models"] = tuple(str(each.with_options(kept)) for each in models)
        off = {"planner": "off", **dict.fromkeys(left_out)} if left_out else {}
        more = _metrics_port_of(options, name) | off
        return _child(GatewayOptions, options, programs.gateway, name, own | more)

    return tuple(gateway(number, name) for number, name in enumerate(names))


def metrics_port(options: ServeOptions, name: str) -> int:
    """The Prometheus port of a child, 0 for none. Ports are consecutive over gateways, prefill and
    decode workers.

    Raises ValueError for an unknown name.
    """
    prefill_of, decode_of = _models_of_workers(options)
    names = (
        "gateway",
        *(f"gateway-{i}" for i in range(1, options.num_gateways)),
        *(f"prefill-{i}" for i in range(len(prefill_of))),
        *(f"decode-{i}" for i in range(len(decode_of))),
    )
    return options.metrics_port + names.index(name) if options.metrics_port else 0


def _metrics_port_of(options: ServeOptions, name: str) -> dict[str, int]:
    port = metrics_port(options, name)
    return {"metrics_port": port} if port else {}


def _child(
    cls: type[Options],
    options: ServeOptions,
    program: tuple[str, ...],
    name: str,
    own: Mapping[str, Any],
) -> ChildSpec:
    """A child's spec. `own` options take precedence over those that the user set."""
    passed_on = {
        option: getattr(options, option)
        for option in cls.model_fields
        if option in options.model_fields_set and option not in _NOT_PASSED_ON
    }
    child_options = build_options(cls, {**passed_on, **own})
    arguments = tuple(to_arguments(child_options))
    return ChildSpec(name, program, arguments, private_environment(child_options))
