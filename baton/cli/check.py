"""`baton check`: proof, on the user's own model, that two tiers give the tokens that one process
gives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from baton.kv_transports import AUTOMATIC

if TYPE_CHECKING:
    from baton.check.run import Verdict


def check(
    model: Annotated[str, typer.Argument(help="Local directory or Hub id.", metavar="MODEL")],
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to compare.")] = 200,
    seed: Annotated[int, typer.Option(help="Chooses the requests.")] = 0,
    kv_transport: Annotated[
        list[str] | None,
        typer.Option(help=f"Transport to try; may be repeated. [default: {' '.join(AUTOMATIC)}]"),
    ] = None,
    model_impl: Annotated[
        str, typer.Option(help="Whose code runs the layers: auto, baton or transformers.")
    ] = "auto",
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
    engine: Annotated[str, typer.Option(help="torch, or oracle to check without a model.")] = (
        "torch"
    ),
) -> None:
    """Compare split with one-process output, token for token. Exit status 1 if they differ."""
    from baton.check.run import check as run_check
    from baton.check.run import split_shapes
    from baton.config import ServeOptions
    from baton.config.load import build_options

    options = {"model": model, "dtype": dtype, "engine": engine, "log_level": "warning"}
    options |= {"kv_cache_dtype": kv_cache_dtype, "model_impl": model_impl}
    transports = kv_transport or AUTOMATIC
    for transport in transports:
        build_options(ServeOptions, {**options, "kv_transport": transport})
    ranks = (prefill_tensor_parallel_size, decode_tensor_parallel_size)
    coroutine = run_check(
        options,
        split_shapes(transports, ranks),
        num_requests=num_requests,
        seed=seed,
        on_verdict=_tell,
    )
    is_equal = asyncio.run(coroutine)
    typer.echo("all equal" if is_equal else "NOT equal")
    raise SystemExit(0 if is_equal else 1)


def _tell(verdict: Verdict) -> None:
    """One line per shape."""
    text = (
        f"{'equal' if verdict.is_equal else 'DIFFERENT'}  {verdict.shape.name}: "
        f"{verdict.num_equal}/{verdict.num_requests} requests, {verdict.num_tokens} tokens, "
        f"{verdict.num_handed_over} handed over, {verdict.seconds:.1f} s"
    )
    if verdict.first_difference:
        request, token = verdict.first_difference
        text += f"; first difference: request {request}, token {token}"
    typer.echo(text)
