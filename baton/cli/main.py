"""`baton`: the commands, and how their errors end."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from baton.cli import chat, check, generate, health, start, status, version
from baton.errors import BatonError, StartupError
from baton.service import refuse


class _Commands(TyperGroup):
    """Tells every BatonError in one line: exit status 2 if nothing was started, 1 if a request failed."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StartupError as error:
            raise SystemExit(refuse(ctx.invoked_subcommand or "", error)) from None
        except BatonError as error:
            told = f" [{error.request_id}]" if error.request_id else ""
            typer.echo(f"baton {ctx.invoked_subcommand}: {error.reason}: {error}{told}", err=True)
            raise SystemExit(1) from None


app = typer.Typer(
    name="baton",
    help="Serve Hugging Face language models from two tiers: prefill here, decode there.",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
start.register(app)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("status")(status.status)
app.command("health")(health.health)
app.command("check")(check.check)
app.command("version")(version.version)
