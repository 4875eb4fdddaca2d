"""`baton doctor`: checks whether this machine can serve."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options

if TYPE_CHECKING:
    from baton.doctor import Finding


def doctor(
    model: Annotated[
        str, typer.Argument(help="Model to look at: a local directory or a Hub id.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address that the gateway would listen on.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port that the gateway would listen on.")] = 50051,
    dtype: Annotated[str, typer.Option(help="Element type of weights and KV.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    registry: Annotated[
        str, typer.Option(envvar="BATON_REGISTRY", help="Redis to ask, redis://host:port/db.")
    ] = "",
    is_json: options.Json = False,
) -> None:
    """Check Python, torch, ports, shared memory, clock and a model's files. Exit status 1 if
    serving is impossible."""
    from baton.config import ServeOptions
    from baton.config.load import build_options
    from baton.doctor import DoctorRequest, Level, examine

    # Refuse the same values as `baton serve`.
    values = {"host": host, "port": port, "dtype": dtype, "device": device}
    build_options(ServeOptions, {"model": model or "none", "block_size": block_size, **values})
    request = DoctorRequest(model, host, port, dtype, device, block_size, registry)
    findings: list[Finding] = []
    for finding in examine(request):
        findings.append(finding)
        if not is_json:
            typer.echo(_line(finding))
    if is_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    num_problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if num_problems:
        typer.echo(f"{num_problems} of {len(findings)} checks found a problem", err=True)
        raise SystemExit(1)


def _line(finding: Finding) -> str:
    """Level, check and result; below, the fix."""
    text = f"{finding.level:<8} {finding.check}: {finding.found}"
    return f"{text}\n{'':8} -> {finding.fix}" if finding.fix else text
