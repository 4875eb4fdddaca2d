"""`python -m distill`: run by `baton distill` in a process of its own, so that the command line
does not import torch."""

from __future__ import annotations

import time

import typer

from baton.config.command import option_command
from baton.config.distill_options import DistillOptions
from baton.errors import StartupError
from baton.service import refuse

#: Steps between two lines of progress.
LOG_INTERVAL = 20


def run(options: DistillOptions) -> None:
    """Train; report progress and results."""
    from distill.run import distill
    from distill.training import Progress

    def report(done: Progress, loss: float) -> None:
        if done.step % LOG_INTERVAL == 0:
            share = done.elapsed_s / (options.minutes * 60)
            rate = done.tokens / done.elapsed_s
            typer.echo(f"{share:6.1%} step {done.step} loss {loss:.3f} {rate:.0f} tokens/s")

    figures = distill(options, time.monotonic, report)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    typer.echo(f"{options.output}: {shown}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command("distill")(option_command(DistillOptions, run, "Train a draft model."))
    try:
        app(prog_name="baton distill")
    except StartupError as error:
        raise SystemExit(refuse("distill", error)) from None
