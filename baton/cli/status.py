"""`baton status`: the workers as seen by the gateway."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options
from baton.cli.connection import Connection, connecting
from baton.sampling_params import describe_values
from baton.types import FALLBACK_NOTICE, UNKNOWN_NUMERICS, NumericsClass

if TYPE_CHECKING:
    from rich.table import Table

    from baton.client import Model, WorkerStatus
    from baton.rpc.tls import TlsFiles

_TIMEOUT_S = 10.0

#: (heading, is numeric). flight: requests of the gateway; blocks: leased ones of all; local:
#: maximum uncached prompt tokens that a decode worker computes itself now.
_COLUMNS = (
    ("worker", False),
    ("tier", False),
    ("state", False),
    ("run", True),
    ("wait", True),
    ("flight", True),
    ("blocks", True),
    ("cached", True),
    ("local", True),
)

#: KV slots of windowed layers, if separate: in use, and total.
_WINDOWS = ("windows", True)

#: Width in characters for output that is not a terminal.
_UNFOLDED_WIDTH = 10_000

#: Minimum width of text columns, which wrap on narrow terminals; numbers are never cut.
_MIN_TEXT_WIDTH = 7


@connecting
def status(
    connection: Connection,
    is_json: options.Json = False,
    shows_blocks: Annotated[
        bool,
        typer.Option("--blocks", help="Show who has which KV blocks, as the workers report it."),
    ] = False,
) -> None:
    """Show models, workers, load and blocks. Exit status 1 if a model has no ready decode worker;
    with --blocks, if a worker does not answer this process or has blocks without an owner."""
    with connection.client(timeout_s=_TIMEOUT_S) as client:
        models = client.models()
    if shows_blocks:
        _show_blocks(models, connection.tls, is_json)
        return
    if is_json:
        typer.echo(json.dumps([dataclasses.asdict(model) for model in models]))
    else:
        _print_tables(models)
    if not all(_is_ready(model) for model in models):
        raise SystemExit(1)


def _show_blocks(models: tuple[Model, ...], tls: TlsFiles | None, is_json: bool) -> None:
    from baton.cli.blocks import as_json, blocks_of, print_blocks

    found = blocks_of((worker for model in models for worker in model.workers), tls)
    if is_json:
        typer.echo(json.dumps(as_json(found)))
    else:
        print_blocks(found)
    if any(worker.error or worker.ledger.orphan_block_ids for worker in found):
        raise SystemExit(1)


def _is_ready(model: Model) -> bool:
    return any(worker.tier == "decode" and worker.state == "ready" for worker in model.workers)


def _print_tables(models: tuple[Model, ...]) -> None:
    from rich.console import Console

    # One line per worker for other programs.
    console = Console() if sys.stdout.isatty() else Console(width=_UNFOLDED_WIDTH)
    for model in models:
        console.print(_table(model))
        defaults = model.sampling_defaults.given
        if defaults:
            typer.echo(f"sampling defaults of the model: {describe_values(defaults)}")
        for line in (*numerics_lines(model.workers), *tier_lines(model.workers)):
            typer.echo(line)


def _table(model: Model) -> Table:
    from rich.markup import escape
    from rich.table import Table

    has_slots = any(worker.num_window_slots for worker in model.workers)
    title = f"{model.name}: {model.max_model_len} tokens, vocabulary {model.vocab_size}"
    table = Table(title=escape(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading, is_number in (*_COLUMNS, *([_WINDOWS] if has_slots else [])):
        if is_number or heading == "worker":
            table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold", min_width=_MIN_TEXT_WIDTH)
    for worker in model.workers:
        slots = [f"{worker.num_leased_window_slots}/{worker.num_window_slots}"] if has_slots else []
        table.add_row(*(escape(cell) for cell in (*_row(worker), *slots)))
    return table


def numerics_lines(workers: Sequence[WorkerStatus]) -> Iterator[str]:
    """Numerics classes of the reached workers, with hints."""
    names_of: dict[NumericsClass, list[str]] = {}
    for worker in workers:
        if worker.numerics != UNKNOWN_NUMERICS:
            names_of.setdefault(worker.numerics, []).append(worker.worker_id)
    for numerics, names in names_of.items():
        suffix = f" ({', '.join(names)})" if len(names_of) > 1 else ""
        yield f"numerics class: {numerics}{suffix}"
        if numerics.is_fallback:
            yield f"{', '.join(names)}: {FALLBACK_NOTICE}"
    if len(names_of) > 1:
        yield (
            f"{len(names_of)} numerics classes: tokens may differ between workers where two are "
            "nearly as likely; level the CPUs with BATON_CPU_LEVEL, or give --numerics=strict"
        )


def tier_lines(workers: Sequence[WorkerStatus]) -> Iterator[str]:
    """One line per tier of KV of each worker."""
    for worker in workers:
        for tier in worker.kv_tiers:
            state = f"off: {tier.off_reason}" if tier.off_reason else ""
            parts = (
                state or ("on" if tier.pays else "not used: computing is faster"),
                f"{tier.num_bytes / 2**20:.0f} MiB",
                f"{tier.num_hits} blocks hit, {tier.num_misses} missed",
                f"{tier.num_evictions} evicted",
                f"{tier.saved_ms / 1e3:.1f} s saved, {tier.lost_ms / 1e3:.1f} s lost",
            )
            yield f"{worker.worker_id} {tier.name}: {'; '.join(parts)}"


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    state = f"{worker.state}: {worker.reason}" if worker.reason else worker.state
    # Separate lines for people, one searchable line for programs.
    separator = "\n" if sys.stdout.isatty() else " "
    return (
        f"{worker.worker_id or '?'}{separator}{worker.address}",
        worker.tier,
        state,
        str(worker.num_running),
        str(worker.num_waiting),
        str(worker.num_in_flight),
        f"{worker.num_leased_blocks}/{worker.num_blocks}",
        str(worker.num_cached_blocks),
        str(worker.local_prefill_threshold) if worker.tier == "decode" else "",
    )
