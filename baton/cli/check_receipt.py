"""`baton check --receipt FILE`: asks again, of a gateway or of a model that it serves itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import typer

from baton.check.receipts import Receipt, ReceiptVerdict, compare, read_receipts, replay
from baton.check.run import Shape, cluster_of


def check_receipt(
    path: Path,
    options: Mapping[str, object] | None,
    address: str | None,
    api_key: str | None,
    model: str | None,
    degrees: Mapping[str, int],
) -> int:
    """options: of a model to serve, in one process per rank, if there is no address of a gateway.
    model: of the gateway; that of the receipt if None. Returns the exit status: 0 if all answers
    come out the same."""
    receipts = read_receipts(path)
    again = asyncio.run(_replay_all(receipts, options or {}, address, api_key, model, degrees))
    is_equal = True
    for receipt, other in zip(receipts, again, strict=True):
        verdict = compare(receipt, other)
        _report(verdict)
        is_equal = is_equal and verdict.is_equal
    return 0 if is_equal else 1


async def _replay_all(
    receipts: tuple[Receipt, ...],
    options: Mapping[str, object],
    address: str | None,
    api_key: str | None,
    model: str | None,
    degrees: Mapping[str, int],
) -> list[Receipt]:
    if address is not None:
        return [await replay(receipt, address, api_key, model) for receipt in receipts]
    first = receipts[0]
    dtypes = [worker.numerics.dtype for worker in first.workers if worker.numerics.dtype]
    # The same numerics, as far as options decide them.
    like = {"dtype": dtypes[-1]} if dtypes else {}
    if first.kv_dtype:
        like["kv_cache_dtype"] = first.kv_dtype
    shape = Shape("replay", {**degrees, "colocated": True, **like}, 1)
    async with cluster_of(options, shape) as cluster:
        return [
            await replay(receipt, cluster.address, model=receipt.adapter) for receipt in receipts
        ]


def _report(verdict: ReceiptVerdict) -> None:
    what = f"{verdict.num_tokens} tokens" + (
        f" and {verdict.num_logprobs} log probabilities"
        if verdict.num_logprobs
        else ", without log probabilities"
    )
    if verdict.is_equal:
        typer.echo(f"the same answer: {what}")
    else:
        typer.echo(f"ANOTHER answer, of {what}; first difference: {verdict.first_difference}")
    for change in verdict.changes:
        typer.echo(f"  {change}")
