"""`baton check`: proof, on the user's own model, that two tiers give the tokens that one process gives."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer


def check(
    model: Annotated[str, typer.Argument(help="Local directory or Hub id.", metavar="MODEL")],
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to compare.")] = 200,
    seed: Annotated[int, typer.Option(help="Chooses the requests.")] = 0,
) -> None:
    """Compare split and one-process output token for token. Exit status 1 if they differ."""
    run_check = import_module("baton.check").run_check
    raise SystemExit(0 if run_check(model, num_requests=num_requests, seed=seed) else 1)
