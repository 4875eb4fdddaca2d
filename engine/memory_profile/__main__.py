"""`python -m engine.memory_profile`: run by `baton profile-memory` in a process of its own, so that
the command line does not import torch."""

from __future__ import annotations

import typer

from baton.config.command import option_command
from baton.config.profile_options import ProfileOptions
from baton.errors import StartupError
from baton.service import refuse


def run(options: ProfileOptions) -> None:
    """Record, draw and print."""
    from engine.memory_profile.profile import write

    for text in write(options):
        typer.echo(f"{text}\n")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command("profile-memory")(option_command(ProfileOptions, run, "Record and draw memory."))
    try:
        app(prog_name="baton profile-memory")
    except StartupError as error:
        raise SystemExit(refuse("profile-memory", error)) from None
