"""`baton`: the commands, and how their errors end."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from baton.cli import (
    chat,
    check,
    distill,
    doctor,
    generate,
    health,
    quantize,
    start,
    status,
    version,
)
from baton.errors import BatonError, StartupError
from baton.grpc_environment import quiet_grpc
from baton.service import EXIT_REFUSED, refuse

#: What typer raises for a command line that does not fit: it has a name only in some versions.
_UsageError: Any = typer.BadParameter.__base__


class _Commands(TyperGroup):
    """Tells every error in one line: exit status 2 if nothing was started, 1 if a request failed."""

    def invoke(self, ctx: Any) -> Any:
        quiet_grpc()
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            told = " ".join(error.format_message().split())
            path = error.ctx.command_path if error.ctx else "baton"
            typer.echo(f"{path}: error: {told.rstrip('.')}; see {path} --help", err=True)
            raise SystemExit(EXIT_REFUSED) from None
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
distill.register(app)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("status")(status.status)
app.command("health")(health.health)
app.command("check")(check.check)
app.command("doctor")(doctor.doctor)
app.command("quantize")(quantize.quantize)
app.command("version")(version.version)
