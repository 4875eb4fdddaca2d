"""`baton status`: the workers as the gateway sees them."""

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

#: Headings, and whether the column holds numbers. flight: requests of the gateway; blocks: owned
#: ones of all; local: missing tokens of a prompt up to which a decode worker would compute them
#: itself now.
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

#: Where windowed layers' KV lies apart: slots in use, and all.
_WINDOWS = ("windows", True)

#: Characters of a line that goes to no terminal.
_UNFOLDED_WIDTH = 10_000

#: Text is folded on narrow terminals, down to this many characters; numbers are never cut.
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
    """Show models, workers, load and blocks. Exit status 1 if a model lacks a decode worker that is
    ready; with --blocks, if a worker does not answer from here or has blocks that nobody owns."""
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
    if any(worker.error or worker.orphan_block_ids for worker in found):
        raise SystemExit(1)


def _is_ready(model: Model) -> bool:
    return any(worker.tier == "decode" and worker.state == "ready" for worker in model.workers)


def _print_tables(models: tuple[Model, ...]) -> None:
    from rich.console import Console

    # What goes to another program is not folded: each line is a worker.
    console = Console() if sys.stdout.isatty() else Console(width=_UNFOLDED_WIDTH)
    for model in models:
        console.print(_table(model))
        defaults = model.sampling_defaults.given
        if defaults:
            typer.echo(f"sampling defaults of the model: {describe_values(defaults)}")
        for line in numerics_lines(model.workers):
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
    """How the workers that were reached round, and what to know about it."""
    names_of: dict[NumericsClass, list[str]] = {}
    for worker in workers:
        if worker.numerics != UNKNOWN_NUMERICS:
            names_of.setdefault(worker.numerics, []).append(worker.worker_id)
    for numerics, names in names_of.items():
        whose = f" ({', '.join(names)})" if len(names_of) > 1 else ""
        yield f"numerics class: {numerics}{whose}"
        if numerics.is_fallback:
            yield f"{', '.join(names)}: {FALLBACK_NOTICE}"
    if len(names_of) > 1:
        yield (
            f"{len(names_of)} numerics classes: tokens may differ between workers where two are "
            "nearly as likely; level the CPUs with BATON_CPU_LEVEL, or give --numerics=strict"
        )


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    state = f"{worker.state}: {worker.reason}" if worker.reason else worker.state
    # Below each other where people read it; in one line, which a program can look for, elsewhere.
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
