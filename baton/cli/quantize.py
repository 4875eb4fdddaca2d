"""`baton quantize`: a smaller copy of a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.quantization.scheme import Scheme


def quantize(
    model: Annotated[str, typer.Argument(help="Local directory or Hub id.", metavar="MODEL")],
    scheme: Annotated[
        Scheme, typer.Option(help="int8 by output, int4 by group of inputs, or float8 by output.")
    ],
    output: Annotated[Path, typer.Option(help="The new checkpoint's directory.")],
    keep_output_layer: Annotated[
        bool,
        typer.Option(
            "--keep-output-layer",
            help="Leave the output layer as it is, for tools that do not read a quantised one.",
        ),
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Of a Hub id.")] = None,
) -> None:
    """Round the linear layers of MODEL and write a checkpoint that `baton serve` and others read."""
    command = [sys.executable, "-m", "baton.model.quantize", "--scheme", scheme]
    command += ["--output", str(output)]
    if keep_output_layer:
        command.append("--keep-output-layer")
    if revision is not None:
        command += ["--revision", revision]
    # A process of its own: this one stays without torch.
    raise SystemExit(subprocess.run([*command, "--", model], check=False).returncode)
