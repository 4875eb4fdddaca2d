"""Options that several client commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="Model to use; empty for the only one served.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
TimeoutS = Annotated[
    float | None, typer.Option("--timeout-s", help="Deadline of the request, in seconds.")
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to produce.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the smallest set of this probability.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the best one.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same tokens.")]
