"""The plan: all shapes of a worker on given devices, and the split into tiers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil

from baton.config.plan_options import PlanOptions
from baton.errors import ConfigError
from baton.kv_transports import planned_device_bytes
from engine.memory_plan import format_bytes
from engine.plan.degrees import (
    Refused,
    candidates,
    layer_exchange,
    name_of,
    variants,
)
from engine.plan.devices import THIS_CPU, Device, find_device
from engine.plan.goodput import (
    NUM_REQUESTS,
    NoSplit,
    Request,
    Slo,
    Split,
    Worker,
    best_split,
    drawn_requests,
)
from engine.plan.memory import KvRow, Reserved, StageMemory, kv_rows, num_users, stage_memory
from engine.plan.model import ModelSizes, parts_of
from engine.plan.roofline import prompt_s, step_s
from engine.plan.source import PlannedModel
from engine.plan.trace import TraceError, read_trace
from engine.ranks.mesh import Degrees

CONTEXTS: Mapping[str, int] = {"4K": 4096, "50K": 50_000, "1M": 1 << 20}
BATCHES = (1, 8, 64, 256)
PROMPTS: Mapping[str, int] = {"1K": 1 << 10, "8K": 1 << 13, "32K": 1 << 15, "128K": 1 << 17}
#: Most devices that are tried for a model that fits on none of those given.
_MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class WeightRow:
    """Weights of one part and type; bytes as a step reads them."""

    part: str
    dtype: str
    num_weights: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ExchangeRow:
    """Exchange of a rank in a layer. bytes_per_token: received; step_us, chunk_ms: time of a step
    of 64 sequences, and of a chunk of a prompt, in all layers."""

    num_per_layer: int
    bytes_per_token: float
    link_bytes_per_s: float
    step_us: float
    chunk_ms: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A worker of some degrees. stages: memory of a rank by stage. users: by context; steps_ms: by
    batch, None where the KV does not fit; prompts_ms: by length."""

    degrees: Degrees
    num_workers: int
    stages: tuple[StageMemory, ...]
    users: Mapping[str, int]
    steps_ms: Mapping[int, float | None]
    prompts_ms: Mapping[str, float]
    exchange: ExchangeRow

    @property
    def tightest(self) -> StageMemory:
        return min(self.stages, key=lambda stage: stage.kv_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `baton plan` reports. available_bytes: of each device."""

    model: str
    num_parameters: int
    dtype: str
    max_len: int
    device: Device
    num_devices: int
    available_bytes: int
    step_context: int
    weights: tuple[WeightRow, ...]
    kv_dtype: str
    kv: tuple[KvRow, ...]
    shapes: tuple[Shape, ...]
    too_large: tuple[Degrees, ...]
    refused: tuple[Refused, ...]
    slo: Slo
    split: Split | NoSplit
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans one model on one kind of device."""

    options: PlanOptions
    model: PlannedModel
    device: Device

    def plan(self) -> Plan:
        """Raises ConfigError for degrees that do not divide, a model that fits on no shape, and a
        trace that cannot be read."""
        options, sizes = self.options, self.model.sizes
        requests = _requests(options)
        fitting, too_large, refused = self._shapes(options.gpus)
        if not fitting:
            raise self._too_large(too_large)
        shapes = tuple(map(self._shape, fitting))
        slo = Slo(options.slo_ttft_ms, options.slo_tpot_ms)
        split = best_split([*map(self._worker, fitting)], requests, slo, options.gpus)
        return Plan(
            model=sizes.name,
            num_parameters=sizes.num_parameters,
            dtype=sizes.storage.dtype,
            max_len=sizes.max_len,
            device=self.device,
            num_devices=options.gpus,
            available_bytes=self._available_bytes,
            step_context=options.input_tokens,
            weights=tuple(_weight_rows(sizes)),
            kv_dtype=sizes.layout.dtype,
            kv=kv_rows(sizes),
            shapes=shapes,
            too_large=tuple(too_large),
            refused=tuple(refused),
            slo=slo,
            split=split,
            notes=tuple(self._notes()),
        )

    @property
    def _available_bytes(self) -> int:
        return int(self.device.memory_bytes * self.options.gpu_memory_utilization)

    def _shapes(self, num_devices: int) -> tuple[list[Degrees], list[Degrees], list[Refused]]:
        """Degrees that fit, that are too large, and that do not divide, for so many devices."""
        fitting: list[Degrees] = []
        too_large: list[Degrees] = []
        refused: list[Refused] = []
        for degrees in candidates(num_devices):
            if not is_asked(self.options, degrees):
                continue
            found, reason = variants(self.model.sizes, degrees, self.model.check)
            for one in found:
                (fitting if self._fits(one) else too_large).append(one)
            if reason:
                refused.append(reason)
        return fitting, too_large, refused

    def _fits(self, degrees: Degrees) -> bool:
        return self._users(degrees, self.model.sizes.layout.block_size) > 0

    def _memory(self, degrees: Degrees) -> tuple[StageMemory, ...]:
        transfers = planned_device_bytes() if self.device.kind == "cuda" else 0
        activations = self.model.activations(self.model.sizes.max_len)
        reserved = Reserved(activations, self.model.graph_bytes, transfers)
        return stage_memory(self.model.sizes, degrees, reserved, self._available_bytes)

    def _users(self, degrees: Degrees, num_tokens: int) -> int:
        return num_users(
            self.model.sizes,
            degrees,
            self._memory(degrees),
            num_tokens,
            keeps_windows_apart=self.model.keeps_windows_apart,
        )

    def _too_large(self, too_large: Sequence[Degrees]) -> ConfigError:
        """The error for a model that no shape holds, or with degrees that do not divide."""
        given, sizes = self.options.gpus, self.model.sizes
        if not too_large:
            return self._indivisible()
        least = min(max(s.weight_bytes for s in self._memory(d)) for d in too_large)
        reserved = self._memory(too_large[0])[0].reserved.total
        text = (
            f"the weights of {sizes.name} take {format_bytes(least)} of each device and a step "
            f"{format_bytes(reserved)}, and {format_bytes(self._available_bytes)} is free"
        )
        # A rank has the least of a model where each layer is a stage; activations and a block of KV
        # stay.
        most = _MOST_DEVICES if self._fits(Degrees(_MOST_DEVICES, len(sizes.layers))) else 0
        for num_devices in range(given + 1, most + 1):
            if found := self._shapes(num_devices)[0]:
                fix = f"use at least {num_devices} ({name_of(found[0])})"
                return ConfigError.of("gpus", given, f"{text}; {fix}")
        return ConfigError.of("gpus", given, f"{text}; use a larger --gpu or smaller weights")

    def _indivisible(self) -> ConfigError:
        """The error of the degrees asked for, or that they do not divide the devices."""
        asked = Degrees(
            self.options.tensor_parallel_size or 1, self.options.pipeline_parallel_size or 1
        )
        self.model.check(asked)
        fix = f"a worker takes {asked.num_ranks} devices; use a multiple of that"
        return ConfigError.of("gpus", self.options.gpus, fix)

    def _step_s(self, degrees: Degrees, batch: int, context: int) -> float:
        return step_s(self.model.sizes, degrees, self.device, batch, context)

    def _prompt_s(self, degrees: Degrees, num_tokens: int) -> float:
        chunk = self.options.max_num_batched_tokens
        return prompt_s(self.model.sizes, degrees, self.device, num_tokens, chunk)

    def _worker(self, degrees: Degrees) -> Worker:
        most = self.options.max_num_seqs
        return Worker(
            degrees,
            lru_cache(partial(self._prompt_s, degrees)),
            lru_cache(partial(self._step_s, degrees)),
            lambda num_tokens: min(most, self._users(degrees, num_tokens)),
        )

    def _shape(self, degrees: Degrees) -> Shape:
        context = self.options.input_tokens
        users = self._users(degrees, context)
        return Shape(
            degrees,
            self.options.gpus // degrees.num_ranks,
            self._memory(degrees),
            {name: self._users(degrees, length) for name, length in CONTEXTS.items()},
            {
                batch: self._step_s(degrees, batch, context) * 1e3 if batch <= users else None
                for batch in BATCHES
            },
            {name: self._prompt_s(degrees, length) * 1e3 for name, length in PROMPTS.items()},
            self._exchange(degrees),
        )

    def _exchange(self, degrees: Degrees) -> ExchangeRow:
        sizes, device = self.model.sizes, self.device
        exchange = layer_exchange(sizes, degrees, device, has_experts=bool(sizes.num_experts))
        num_layers, chunk = len(sizes.layers), self.options.max_num_batched_tokens
        return ExchangeRow(
            exchange.num,
            exchange.bytes_per_token,
            device.link_bytes_per_s,
            num_layers * exchange.seconds(64, device) * 1e6,
            num_layers * exchange.seconds(chunk, device) * 1e3,
        )

    def _notes(self) -> list[str]:
        sizes, notes = self.model.sizes, []
        kinds = {row.kind for row in kv_rows(sizes)}
        if sizes.longest_len < max(CONTEXTS.values()):
            notes.append(f"the model is made for {sizes.longest_len} tokens")
        if "window" in kinds and len(kinds) > 1 and not self.model.keeps_windows_apart:
            notes.append("blocks on a GPU hold windowed layers' KV of all tokens")
        if self.model.graph_bytes is None:
            notes.append("CUDA graphs are not counted: their size needs Triton here")
        return notes


def _weight_rows(sizes: ModelSizes) -> list[WeightRow]:
    storage, rows = sizes.storage, []
    for part, weights in parts_of(sizes).items():
        for dtype, count, one in (
            (storage.dtype, weights.plain, replace(weights, quantized=0)),
            (storage.levels, weights.quantized, replace(weights, plain=0)),
        ):
            if count:
                rows.append(WeightRow(part, dtype, count, round(storage.read_bytes(one))))
    return rows


def is_asked(options: PlanOptions, degrees: Degrees) -> bool:
    """Whether the options do not exclude these degrees."""
    tensor, pipeline = options.tensor_parallel_size, options.pipeline_parallel_size
    return tensor in (None, degrees.tensor) and pipeline in (None, degrees.pipeline)


def find_or_measure(options: PlanOptions, sizes: ModelSizes) -> Device:
    """The device of options.gpu; the CPU is measured, with linear layers and heads of the model's
    size, and with as many ranks as the plan has, but not more than the machine has cores."""
    if options.gpu != THIS_CPU:
        return find_device(options.gpu)
    # Import torch's kernels and take seconds.
    from engine.plan.host import CpuProbe, Heads, share_of
    from engine.plan.host_costs import measure_hosts

    total = sum((layer.total for layer in sizes.layers), sizes.head)
    weight_bytes, dtype = ceil(sizes.storage.read_bytes(total)), sizes.storage.dtype
    device = share_of(CpuProbe(weight_bytes, dtype, Heads.of(sizes)).measure(), options.gpus)
    most = max(2, len(os.sched_getaffinity(0)))
    degrees = {each.tensor for each in candidates(options.gpus) if is_asked(options, each)}
    ranks = {1, *(min(size, most) for size in degrees)}
    return replace(device, hosts=measure_hosts(sorted(ranks), dtype))


def _requests(options: PlanOptions) -> tuple[Request, ...]:
    """The first requests of the trace, or drawn ones. Raises ConfigError."""
    if options.trace is None:
        return drawn_requests(options.input_tokens, options.output_tokens)
    try:
        entries = read_trace(options.trace, NUM_REQUESTS)
    except (TraceError, OSError) as error:
        raise ConfigError.of("trace", options.trace, f"give a readable trace ({error})") from None
    first = entries[0].arrival_s
    return tuple(
        Request(entry.arrival_s - first, entry.num_input_tokens, entry.num_output_tokens)
        for entry in entries
    )
