"""`baton version`."""

from __future__ import annotations

import typer

from baton import __version__
from baton.types import PROTOCOL_VERSION


def version() -> None:
    """Print the versions of Baton and of its protocol."""
    typer.echo(f"baton {__version__}, protocol {PROTOCOL_VERSION}")
