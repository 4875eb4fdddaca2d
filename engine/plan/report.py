"""A plan as JSON, and as tables for people."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from engine.memory_plan import format_bytes
from engine.plan.degrees import name_of
from engine.plan.goodput import NoSplit
from engine.plan.plan import Plan, Shape

#: Width in characters for output that is not a terminal.
_UNFOLDED_WIDTH = 200


def as_json(value: Any) -> Any:
    """Plain values: dataclasses and mappings as objects, sequences as lists."""
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value


def print_plan(plan: Plan) -> None:
    """Print all tables to stdout."""
    width = None if sys.stdout.isatty() else _UNFOLDED_WIDTH
    console = Console(width=width, highlight=False, soft_wrap=width is not None)
    for part in _parts(plan):
        console.print(part)
        console.print()


def _parts(plan: Plan) -> Iterator[RenderableType]:
    device = plan.device
    yield (
        f"{plan.model}, {plan.num_parameters / 1e9:.3g} billion parameters, {plan.dtype}, "
        f"{plan.max_len} tokens, on {plan.num_devices} x {device.name}: "
        f"{format_bytes(plan.available_bytes)} usable, "
        f"{number(device.read_bytes_per_s / 1e9)} GB/s, "
        f"{number(device.flops_per_s[plan.dtype] / 1e12)} TFLOP/s, link "
        f"{number(device.link_bytes_per_s / 1e9)} GB/s ({device.source})"
    )
    yield _table(
        "Weights",
        ("part", "type", "number", "bytes"),
        [
            (row.part, row.dtype, f"{row.num_weights:,}", format_bytes(row.num_bytes))
            for row in plan.weights
        ],
    )
    yield _table(
        f"KV ({plan.kv_dtype})",
        ("group", "layers", "per token", "per sequence"),
        [
            (
                row.kind,
                str(row.num_layers),
                format_bytes(row.token_bytes) if row.token_bytes else "-",
                format_bytes(row.sequence_bytes)
                if row.sequence_bytes
                else f"last {row.max_tokens} tokens"
                if row.max_tokens
                else "all tokens",
            )
            for row in plan.kv
        ],
    )
    lengths = tuple(plan.shapes[0].users)
    yield _table(
        "Memory of a rank, and users of a worker",
        (
            "degrees",
            "workers",
            "weights",
            "activations",
            "graphs",
            "transfers",
            "KV left",
            *lengths,
        ),
        [_memory_row(shape, plan.num_devices) for shape in plan.shapes],
    )
    batches, prompts = tuple(plan.shapes[0].steps_ms), tuple(plan.shapes[0].prompts_ms)
    yield _table(
        f"At the roofline, ms: steps of a batch at {plan.step_context} tokens each, and prompts",
        ("degrees", *(f"step of {n}" for n in batches), *(f"prompt {n}" for n in prompts)),
        [_time_row(shape) for shape in plan.shapes],
    )
    if any(shape.exchange.num_per_layer for shape in plan.shapes):
        yield _table(
            "Exchange of a rank",
            ("degrees", "a layer", "bytes a token and layer", "step of 64, us", "chunk, ms"),
            [_exchange_row(shape) for shape in plan.shapes if shape.exchange.num_per_layer],
        )
    yield from _lines(plan)


def _lines(plan: Plan) -> Iterator[str]:
    if plan.too_large:
        yield f"Too large: {', '.join(map(name_of, plan.too_large))}"
    for reason, degrees in _by_reason(plan).items():
        yield f"Does not divide: {', '.join(degrees)}: {reason}"
    slo = f"TTFT {plan.slo.ttft_ms:g} ms, time per token {plan.slo.tpot_ms:g} ms"
    split = plan.split
    if isinstance(split, NoSplit):
        yield f"No split ({slo}): {split.reason}"
    else:
        tiers = ", ".join(
            f"{tier.num_workers} x {name_of(tier.degrees)} {name}"
            for name, tier in (("prefill", split.prefill), ("decode", split.decode))
        )
        yield (
            f"Best split ({slo}): {tiers}: {number(split.goodput)} requests/s; "
            f"TTFT p90 {number(split.ttft_p90_ms)} ms, decode batch {split.batch}, "
            f"step {number(split.step_ms)} ms"
        )
    for note in plan.notes:
        yield f"Note: {note}"


def _by_reason(plan: Plan) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in plan.refused:
        found.setdefault(each.reason, []).append(name_of(each.degrees))
    return found


def _memory_row(shape: Shape, num_devices: int) -> tuple[str, ...]:
    rank = shape.tightest
    num_idle = num_devices - shape.num_workers * shape.degrees.num_ranks
    graphs = rank.reserved.graphs
    return (
        name_of(shape.degrees),
        f"{shape.num_workers}, {num_idle} idle" if num_idle else str(shape.num_workers),
        format_bytes(rank.weight_bytes),
        format_bytes(rank.reserved.activations),
        "?" if graphs is None else format_bytes(graphs),
        format_bytes(rank.reserved.transfers),
        format_bytes(rank.kv_bytes),
        *(f"{users:,}" for users in shape.users.values()),
    )


def _time_row(shape: Shape) -> tuple[str, ...]:
    steps = ("no memory" if ms is None else number(ms) for ms in shape.steps_ms.values())
    return (name_of(shape.degrees), *steps, *map(number, shape.prompts_ms.values()))


def _exchange_row(shape: Shape) -> tuple[str, ...]:
    row = shape.exchange
    return (
        name_of(shape.degrees),
        str(row.num_per_layer),
        number(row.bytes_per_token),
        number(row.step_us),
        number(row.chunk_ms),
    )


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def number(value: float) -> str:
    """Three digits that count, thousands with commas."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
