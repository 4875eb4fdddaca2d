"""`baton check`: verifies on the user's own model that two tiers and one process give the same
tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.kv_transports import AUTOMATIC
from baton.rpc.address import is_address

if TYPE_CHECKING:
    from baton.check.faults import FaultVerdict
    from baton.check.run import Verdict
    from baton.check.soak import SoakCounts, SoakVerdict


def check(
    model: Annotated[
        str | None, typer.Argument(help="Local directory or Hub id.", metavar="[MODEL]")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Check any server of OpenAI's HTTP API instead, such as http://127.0.0.1:8000.",
            metavar="URL",
        ),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(
            "--model", help="With --against: the model; the receipt's, or else the first if none."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="With --against: a key that the server takes.", envvar="BATON_API_KEY"),
    ] = None,
    receipt: Annotated[
        Path | None,
        typer.Option(
            help="Ask again for this answer, which has a receipt, of MODEL or of the gateway that "
            "--against names by its gRPC port.",
            metavar="FILE",
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests to compare.  [default: 200; 24 with --against]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the requests.")] = 0,
    kv_transport: Annotated[
        list[str] | None,
        typer.Option(help=f"Transport to try; may be repeated. [default: {' '.join(AUTOMATIC)}]"),
    ] = None,
    model_impl: Annotated[
        str, typer.Option(help="Whose code runs the layers: auto, baton or transformers.")
    ] = "auto",
    rope_scaling: Annotated[
        str | None, typer.Option(help="Rotary scaling, as of baton serve.", metavar="JSON")
    ] = None,
    hf_overrides: Annotated[
        str | None, typer.Option(help="Fields of config.json, as of baton serve.", metavar="JSON")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Element type of weights; auto takes the checkpoint's.")
    ] = "float32",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Element type of KV, such as int8; auto takes --dtype's.")
    ] = "auto",
    prefill_tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Processes that share the model in each prefill worker.")
    ] = 1,
    decode_tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Processes that share the model in each decode worker.")
    ] = 1,
    prefill_pipeline_parallel_size: Annotated[
        int, typer.Option(min=1, help="Stages of the model in each prefill worker.")
    ] = 1,
    decode_pipeline_parallel_size: Annotated[
        int, typer.Option(min=1, help="Stages of the model in each decode worker.")
    ] = 1,
    context_parallel_size: Annotated[
        int, typer.Option(min=1, help="Processes that share a prompt in each prefill worker.")
    ] = 1,
    data_parallel_size: Annotated[
        int,
        typer.Option(min=1, help="Processes with sequences of their own that share experts."),
    ] = 1,
    enable_expert_parallel: Annotated[
        bool,
        typer.Option(
            "--enable-expert-parallel", help="Whole experts on the processes that share a model."
        ),
    ] = False,
    tensor_parallel_cut: Annotated[
        str,
        typer.Option(
            help="outputs or sums, as of baton serve; with sums, the tiers and the one worker that "
            "they are compared with have equal --tensor-parallel-size."
        ),
    ] = "outputs",
    engine: Annotated[str, typer.Option(help="torch, or oracle to check without a model.")] = (
        "torch"
    ),
    long: Annotated[
        bool,
        typer.Option("--long", help="Prompts up to the model's length, instead of 600 tokens."),
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens of a sequence; the model's if none.")
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            help="Adapter for some of the requests; may be repeated.", metavar="NAME=PATH"
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="KV memory of each worker, such as 2GiB.")
    ] = None,
    faults: Annotated[
        bool,
        typer.Option(
            "--faults",
            help="Kill and freeze the processes it has started, under streams of these requests.",
        ),
    ] = False,
    num_rounds: Annotated[
        int, typer.Option(min=1, help="With --faults: how often each fault happens.")
    ] = 1,
    num_streams: Annotated[
        int, typer.Option(min=0, help="With --faults: rounds go on until so many streams ended.")
    ] = 0,
    soak: Annotated[
        bool,
        typer.Option(
            "--soak", help="Serve these requests for hours, and measure what the processes hold."
        ),
    ] = False,
    hours: Annotated[
        float,
        typer.Option(min=0.01, help="With --soak: how long. With --faults: no round begins later."),
    ] = 24.0,
) -> None:
    """Compare the output of two tiers with that of one process. Tokens must be equal.

    Exit status 1 if they differ.

    With --faults, verify promises 1 to 3 of the README while processes are killed: the same tokens,
    none lost or repeated, no block leaked. Exit status 1 if one fails.

    With --soak, verify that memory, blocks, file descriptors and threads stay constant under hours
    of streams, some of them cancelled or disconnected, and that nothing is held at the end. Exit
    status 1 if not.

    With --against, verify any server of OpenAI's HTTP API by its answers: streams, usage, answers
    under load, cancels, cache hits, choices, log probabilities, and that no answer has another
    prompt's content. Exit status 1 if a check fails.

    With --receipt, ask again for one answer, with the receipt's dtype, and compare its tokens and
    log probabilities. Exit status 1 if they differ.
    """
    if (against is not None or receipt is not None) and (faults or soak or long):
        raise typer.BadParameter(
            "--against and --receipt go with none of --faults, --soak and --long; leave them out"
        )
    if against is not None and receipt is None:
        from baton.cli import check_against as server_check

        num_asked = num_requests or server_check.NUM_REQUESTS
        raise SystemExit(
            server_check.check_against(
                against, served_model or model, api_key, num_requests=num_asked, seed=seed
            )
        )
    if model is None and against is None:
        raise typer.BadParameter("give a model, or a server with --against", param_hint="MODEL")
    num_requests = num_requests or 200
    if long and (faults or soak):
        raise typer.BadParameter("--long: goes with neither --faults nor --soak; leave it out")
    from baton.check.run import check as run_check
    from baton.check.run import split_shapes
    from baton.config import ServeOptions
    from baton.config.load import build_options

    options: dict[str, object] = {"model": model or "-", "dtype": dtype, "engine": engine}
    options |= {"kv_cache_dtype": kv_cache_dtype, "model_impl": model_impl, "log_level": "warning"}
    if tensor_parallel_cut != "outputs":
        sizes = {prefill_tensor_parallel_size, decode_tensor_parallel_size}
        if len(sizes) > 1:
            raise typer.BadParameter(
                f"--tensor-parallel-cut={tensor_parallel_cut}: sums of other numbers of parts are "
                "rounded differently; give both tiers the same --...-tensor-parallel-size"
            )
        options |= {"tensor_parallel_cut": tensor_parallel_cut, "tensor_parallel_size": sizes.pop()}
    changes = {
        "rope_scaling": rope_scaling,
        "hf_overrides": hf_overrides,
        "max_model_len": max_model_len,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "lora_modules": tuple(lora_modules) if lora_modules else None,
    }
    options |= {name: value for name, value in changes.items() if value is not None}
    if receipt is not None:
        from baton.cli.check_receipt import check_receipt

        if against is not None and not is_address(against):
            text = f"{against}: with --receipt, the gateway's gRPC port, such as 127.0.0.1:50051"
            raise typer.BadParameter(text, param_hint="--against")
        degrees = {
            "tensor_parallel_size": decode_tensor_parallel_size,
            "pipeline_parallel_size": decode_pipeline_parallel_size,
        }
        raise SystemExit(check_receipt(receipt, options, against, api_key, served_model, degrees))
    transports = kv_transport or AUTOMATIC
    for transport in transports:
        build_options(ServeOptions, {**options, "kv_transport": transport})
    if faults:
        faulted = kv_transport or AUTOMATIC[:1]
        raise SystemExit(
            max(
                _check_faults(
                    {**options, "kv_transport": transport},
                    *(num_requests, num_rounds, hours, seed + number),
                    num_streams=-(-num_streams // len(faulted)),
                )
                for number, transport in enumerate(faulted)
            )
        )
    if soak:
        raise SystemExit(
            _soak({**options, "kv_transport": transports[0]}, num_requests, hours, seed)
        )
    degrees = {
        "prefill_tensor_parallel_size": prefill_tensor_parallel_size,
        "prefill_pipeline_parallel_size": prefill_pipeline_parallel_size,
        "decode_tensor_parallel_size": decode_tensor_parallel_size,
        "decode_pipeline_parallel_size": decode_pipeline_parallel_size,
        "context_parallel_size": context_parallel_size,
        "data_parallel_size": data_parallel_size,
        "enable_expert_parallel": enable_expert_parallel,
    }
    coroutine = run_check(
        options,
        split_shapes(transports, degrees),
        num_requests=num_requests,
        seed=seed,
        on_verdict=_report,
        is_long=long,
    )
    is_equal = asyncio.run(coroutine)
    typer.echo("all equal" if is_equal else "NOT equal")
    raise SystemExit(0 if is_equal else 1)


def _report(verdict: Verdict) -> None:
    """Print one line per shape."""
    text = (
        f"{'equal' if verdict.is_equal else 'DIFFERENT'}  {verdict.shape.name}: "
        f"{verdict.num_equal}/{verdict.num_requests} requests, {verdict.num_tokens} tokens, "
        f"{verdict.num_handed_over} handed over, {verdict.seconds:.1f} s"
    )
    if verdict.first_difference:
        request, token = verdict.first_difference
        text += f"; first difference: request {request}, token {token}"
    typer.echo(text)


def _check_faults(
    options: dict[str, object],
    num_requests: int,
    num_rounds: int,
    hours: float,
    seed: int,
    *,
    num_streams: int,
) -> int:
    """Returns the exit status."""
    from baton.check.faults import check_faults

    began_s = time.monotonic()
    typer.echo(f"{options['model']}, KV over {options['kv_transport']}, --seed {seed}")
    verdict = asyncio.run(
        check_faults(
            {**options, "log_level": "error"},
            num_requests=num_requests,
            num_rounds=num_rounds,
            max_hours=hours,
            seed=seed,
            on_fault=lambda fault, num: typer.echo(f"{fault}: {num} streams faulted so far"),
            num_streams=num_streams,
        )
    )
    report_faults(verdict)
    typer.echo(f"{time.monotonic() - began_s:.0f} s in all, --seed {seed}")
    return 0 if verdict.has_held else 1


def report_faults(verdict: FaultVerdict) -> None:
    """Print one line per fault and prompt length, then one per promise."""
    headings = ("times", "streams", "resumed", "errors", "wrong", "gap p50", "p99", "longest, s")
    typer.echo("\n" + _row("lived through", headings))
    for result in (*verdict.results, *verdict.by_prompt, *verdict.by_door):
        counts = (
            *(result.num_faults, result.num_streams, result.num_resumed),
            *(result.num_errors, result.num_wrong),
        )
        gaps = (result.gap_p50_s, result.gap_p99_s, result.longest_s)
        typer.echo(_row(result.fault, (*map(str, counts), *(f"{gap:.2f}" for gap in gaps))))
    num_blocks = verdict.num_leaked_blocks
    promises = (
        ("1, the same tokens", verdict.differences),
        ("2, no token lost or doubled", verdict.disorders),
        ("2, a stream outlives what serves it", verdict.errors),
        ("3, no block leaks", (f"{num_blocks} blocks are held",) if num_blocks else ()),
    )
    typer.echo(f"\n{verdict.num_streams} streams:")
    for promise, found in promises:
        state = f"BROKEN {len(found)} times, first: {found[0]}" if found else "held"
        typer.echo(f"promise {promise}: {state}")


def _soak(options: dict[str, object], num_requests: int, hours: float, seed: int) -> int:
    """Returns the exit status."""
    from baton.check.soak import soak

    verdict = asyncio.run(
        soak(
            {**options, "log_level": "error"},
            hours=hours,
            num_requests=num_requests,
            seed=seed,
            on_progress=lambda hours, counts: typer.echo(f"{hours:.2f} h: {_counts(counts)}"),
        )
    )
    _report_soak(verdict)
    return 0 if verdict.is_sound else 1


def _counts(counts: SoakCounts) -> str:
    errors = ", ".join(f"{number} {reason}" for reason, number in counts.errors.items()) or "none"
    return (
        f"{counts.num_streams} streams, {counts.num_tokens} tokens, {counts.num_cancelled} "
        f"cancelled, {counts.num_disconnects} disconnected, {counts.num_wrong} wrong; "
        f"errors: {errors}"
    )


def _report_soak(verdict: SoakVerdict) -> None:
    """Print one line per process and quantity, then the results of the checks."""
    typer.echo(
        f"\n{'process and quantity':<38}" + "".join(f"{name:>11}" for name in _TREND_COLUMNS)
    )
    for trend in verdict.trends:
        values = (trend.begins, trend.ends, trend.largest, trend.ends - trend.begins, trend.bound)
        state = "flat" if trend.is_flat else "RISES"
        name = f"{trend.process}: {trend.quantity}"
        typer.echo(_row(name, [*(f"{value:.1f}" for value in values), state]))
    held = verdict.held
    counts = verdict.counts
    typer.echo(f"\n{verdict.hours:.2f} h: {_counts(counts)}")
    if counts.wrong:
        typer.echo(f"WRONG, first: {counts.wrong}")
    if verdict.deaths:
        typer.echo(f"DIED: {', '.join(verdict.deaths)}")
    typer.echo(
        f"held at the end: {held.num_blocks} blocks, {held.num_tickets} tickets, "
        f"{held.num_requests} requests"
    )


#: begins, ends: of the line fitted to the measurements after warm-up.
_TREND_COLUMNS = ("begins", "ends", "largest", "rise", "bound", "")


def _row(name: str, values: Sequence[str]) -> str:
    return f"{name:<38}" + "".join(f"{value:>11}" for value in values)
