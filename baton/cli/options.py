"""Options of several client commands."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="Model to use; empty for the only one served.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
TimeoutS = Annotated[
    float | None, typer.Option("--timeout-s", help="Deadline of the request, in seconds.")
]
