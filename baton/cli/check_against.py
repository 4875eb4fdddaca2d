"""`baton check --against URL`: prints what held of a server, and how to see what did not."""

from __future__ import annotations

import typer

from baton.check.against.checks import CHECKS, Check, run_check
from baton.check.against.server import Refused, Server
from baton.check.against.trial import Finding, Trial

NUM_REQUESTS, CONCURRENCY = 24, 16


def check_against(
    url: str, model: str | None, api_key: str | None, *, num_requests: int, seed: int
) -> int:
    """Returns the exit status: 0 if all that could be tried held."""
    try:
        server = Server(url, model, api_key)
    except Refused as error:
        raise typer.BadParameter(error.message, param_hint="--against") from error
    trial = Trial(server, num_requests=num_requests, concurrency=CONCURRENCY, seed=seed)
    typer.echo(f"{server.model} at {server.url}, seed {seed}")
    findings = []
    for check in CHECKS:
        findings.append((check, run_check(check, trial)))
        typer.echo(_row(*findings[-1]))
    for check, finding in findings:
        if finding.failures:
            typer.echo(_first_failure(server, check, finding))
    has_held = not any(finding.failures for _, finding in findings)
    typer.echo("\nall that was tried held" if has_held else "\nNOT all held")
    return 0 if has_held else 1


def _row(check: Check, finding: Finding) -> str:
    if finding.untried:
        state = f"not tried ({finding.untried})"
    elif finding.failures:
        requests = {id(failure.body) for failure in finding.failures}
        state = f"FAILED for {len(requests)} of {finding.num_tried}"
    else:
        state = f"held for {finding.num_tried}"
    return f"{check.claim:<72}  {state}" + (f"; {finding.note}" if finding.note else "")


def _first_failure(server: Server, check: Check, finding: Finding) -> str:
    first = finding.failures[0]
    text = f"\n{check.name}: {len(finding.failures)} failures. The first, {first.how}: {first.what}"
    return f"{text}\n  {server.command(first.path, first.body)}" if first.body else text
