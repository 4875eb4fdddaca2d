"""Records all parts of a profile, and writes pictures, tables and data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from baton.config.plan_options import PlanOptions
from baton.config.profile_options import ProfileOptions
from baton.errors import ConfigError
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelChoice, StepLimits
from engine.host_memory import available_memory_bytes
from engine.kv.tensors.prefault import wait_until_backed
from engine.load import load_engine
from engine.memory_profile import picture, report
from engine.memory_profile.attention import KINDS, AttentionShape, record_attention
from engine.memory_profile.longest import WEIGHT_BITS, longest_prompt
from engine.memory_profile.recorder import recorder_of
from engine.memory_profile.report import Section
from engine.memory_profile.users import UserLoad, record_users
from engine.memory_profile.waste import allocations, replay_trace
from engine.plan.source import PlannedModel, read_model
from engine.plan.trace import TraceError, read_trace

_NUM_BOUNDS = 16


class Part(NamedTuple):
    """One part of a profile. data: for programs."""

    section: Section
    picture: Path
    data: list[Any]


class MemoryProfile:
    """The parts of one profile, recorded when they are asked for."""

    def __init__(self, options: ProfileOptions) -> None:
        """Raises ConfigError, ModelError; makes the output directory."""
        self._options = options
        kind = "cuda" if options.device.startswith("cuda") else "cpu"
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError.of("device", options.device, "there is no such GPU here; use cpu")
        self._device = torch.device(options.device if kind == "cuda" else "cpu")
        self._model: PlannedModel = read_model(_plan_options(options), kind, has_float8=True)
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fix = f"give a directory to write to ({error})"
            raise ConfigError.of("output", options.output, fix) from None

    def parts(self) -> Iterator[Part]:
        """Record and draw, one after the other. Raises ConfigError."""
        if self._options.trace is not None:
            yield self._waste(self._options.trace)
        yield self._longest()
        yield self._users()
        yield self._attention()

    def _users(self) -> Part:
        given, engine = self._options, load_engine(_engine_config(self._options))
        wait_until_backed()
        lengths = given.input_tokens, given.output_tokens
        runs = []
        for num_users in (1, *given.users):  # The first run pays the one-time costs.
            load = UserLoad(num_users, *lengths, given.max_num_batched_tokens)
            runs.append(record_users(engine, load, recorder_of(self._device)))
        engine.close()
        path = given.output / "users.png"
        picture.draw_users(runs[1:], path)
        return Part(report.users_section(runs[1:]), path, runs[1:])

    def _attention(self) -> Part:
        given, sizes = self._options, self._model.sizes
        layout = sizes.layout
        num_heads = max(1, sizes.attention_width // layout.head_dim)
        num_kv_heads = layout.num_kv_heads if num_heads % layout.num_kv_heads == 0 else num_heads
        shape = AttentionShape(
            *(num_heads, num_kv_heads, layout.head_dim, getattr(torch, sizes.storage.dtype)),
            *(self._device, given.max_num_batched_tokens),
        )
        runs = [
            record_attention(shape, kind, length, self._free_bytes(), recorder_of(self._device))
            for length in given.attention_tokens
            for kind in KINDS
        ]
        path = given.output / "attention.png"
        picture.draw_attention(runs, path)
        return Part(report.attention_section(runs), path, runs)

    def _free_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0])
        return available_memory_bytes()

    def _waste(self, trace: Path) -> Part:
        given = self._options
        try:
            entries = read_trace(trace, given.trace_requests)
        except (OSError, TraceError) as error:
            raise ConfigError.of("trace", trace, f"give a trace to read: {error}") from None
        longest = max(each.num_input_tokens + each.num_output_tokens for each in entries)
        capacity = given.trace_kv_tokens or 16 * longest
        block_sizes = sorted({given.block_size, 256})
        found = [
            replay_trace(name, memory, capacity, entries)
            for name, memory in allocations(capacity, longest, block_sizes).items()
        ]
        name = f"The first {len(entries):,} requests of {trace.name}"
        path = given.output / "waste.png"
        picture.draw_waste(found, path)
        return Part(report.waste_section(found, capacity, name), path, found)

    def _longest(self) -> Part:
        sizes = self._model.sizes
        low = longest_prompt(sizes, "int4", self._model.activations, 1).weight_bytes
        whole = longest_prompt(sizes, "16-bit", self._model.activations, 1).weight_bytes
        bound = self._options.memory_bytes or 2 * whole + self._model.activations(sizes.max_len)
        steps = range(_NUM_BOUNDS + 1)
        bounds = [low + (bound - low) * step // _NUM_BOUNDS for step in steps if bound > low]
        found = [
            longest_prompt(sizes, weights, self._model.activations, memory_bytes)
            for weights in WEIGHT_BITS
            for memory_bytes in bounds or [bound]
        ]
        path = self._options.output / "longest.png"
        picture.draw_longest(found, sizes.max_len, path)
        return Part(report.longest_section(found, sizes.max_len), path, found)


def write(options: ProfileOptions) -> Iterator[str]:
    """Record everything and write index.html and profile.json; yields each part as text when it is
    done. Raises ConfigError, ModelError, OSError."""
    parts = []
    for part in MemoryProfile(options).parts():
        parts.append(part)
        yield report.as_text(part.section)
    title = f"Memory of {Path(options.model).name}"
    page = report.as_html(title, [(part.section, part.picture) for part in parts])
    (options.output / "index.html").write_text(page, encoding="utf-8")
    data = {p.section.name: [dataclasses.asdict(each) for each in p.data] for p in parts}
    (options.output / "profile.json").write_text(json.dumps(data), encoding="utf-8")
    yield f"Pictures, index.html and profile.json are in {options.output}"


def _plan_options(options: ProfileOptions) -> PlanOptions:
    return PlanOptions(
        model=options.model,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        block_size=options.block_size,
        max_num_seqs=1,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )


def _engine_config(options: ProfileOptions) -> EngineConfig:
    return EngineConfig(
        ModelChoice(options.model, dtype=options.dtype),
        CacheConfig(
            block_size=options.block_size,
            dtype=options.kv_cache_dtype,
            memory_bytes=options.kv_cache_memory_bytes,
        ),
        StepLimits(max(options.users), options.max_num_batched_tokens),
        DeviceConfig(options.device, options.num_threads),
    )
