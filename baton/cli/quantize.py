"""`baton quantize`: a smaller copy of a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer


def quantize(
    model: Annotated[str, typer.Argument(help="Local directory or Hub id.", metavar="MODEL")],
    scheme: Annotated[
        Literal["int8", "int4", "fp8", "sparse24"],
        typer.Option(
            help="int8 by output, int4 by group of inputs, float8 by output, or sparse24: two of "
            "each four weights."
        ),
    ],
    output: Annotated[Path, typer.Option(help="The new checkpoint's directory.")],
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A text such as the model is used for; int4 and sparse24 then change what it "
            "computes there least."
        ),
    ] = None,
    keep_output_layer: Annotated[
        bool,
        typer.Option(
            "--keep-output-layer",
            help="Leave the output layer as it is, for tools that do not read a quantised one.",
        ),
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Of a Hub id.")] = None,
) -> None:
    """Round or prune the linear layers of MODEL and write a checkpoint that `baton serve` and
    others read."""
    command = [sys.executable, "-m", "engine.quantize", "--scheme", scheme]
    command += ["--output", str(output)]
    if calibration is not None:
        command += ["--calibration", str(calibration)]
    if keep_output_layer:
        command.append("--keep-output-layer")
    if revision is not None:
        command += ["--revision", revision]
    # A process of its own: this one stays without torch.
    raise SystemExit(subprocess.run([*command, "--", model], check=False).returncode)
