"""`baton`: dispatches commands and reports their errors. Each command's module is imported when it
is used, because some imports are slow."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperGroup

from baton import __version__

#: Exit status if the command line is invalid and nothing was started.
EXIT_REFUSED = 2

#: typer's usage error, which has a public name only in some versions.
_UsageError: Any = typer.BadParameter.__base__

#: Commands by name: module, function and one-line help.
COMMANDS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "serve": (
            "start",
            "serve_command",
            "Start all tiers on this machine and keep them running.",
        ),
        "gateway": ("start", "gateway_command", "Start the gateway alone."),
        "prefill": ("start", "prefill_command", "Start one prefill worker."),
        "decode": ("start", "decode_command", "Start one decode worker."),
        "generate": ("generate", "generate", "Complete PROMPT and print the text as it streams."),
        "chat": ("chat", "chat", "Chat with the model in the terminal."),
        "status": ("status", "status", "Show models, workers, load and blocks."),
        "health": ("health", "health", "Query the health of a gateway or worker."),
        "check": ("check", "check", "Compare the output of two tiers with that of one process."),
        "doctor": (
            "doctor",
            "doctor",
            "Check Python, torch, ports, shared memory, clock and a model's files.",
        ),
        "plan": (
            "plan",
            "plan_command",
            "Plan memory, degrees, times and tiers of a model on devices.",
        ),
        "profile-memory": (
            "profile_memory",
            "profile_memory_command",
            "Record where memory goes, and draw it.",
        ),
        "distill": (
            "distill",
            "distill_command",
            "Train a small model to draft for a target (--speculative-model).",
        ),
        "set-role": ("role", "set_role", "Change the role of a running worker."),
        "version": (
            "version",
            "version",
            "Print the versions of Baton and of its protocol.",
        ),
    }
)


class _Commands(TyperGroup):
    """Reports every error in one line: exit status 2 if nothing was started, 1 if a request
    failed."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        module, function, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"baton.cli.{module}"), function)
        one = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        one.command(cmd_name)(command)
        return typer.main.get_command(one)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print a line before the imports of `serve`, which take a second on a loaded machine; not
        during shell completion, which would offer it as a completion."""
        is_help = bool({"-h", "--help"} & set(args))
        if args and args[0] == "serve" and not is_help and not ctx.resilient_parsing:
            with suppress(OSError):  # a full disk stops nothing
                sys.stdout.write(f"Baton {__version__} is starting\n")
                sys.stdout.flush()
        return list(super().parse_args(ctx, args))

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])

    def invoke(self, ctx: Any) -> Any:
        from baton.errors import BatonError, StartupError
        from baton.grpc_environment import quiet_grpc

        quiet_grpc()
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            message = " ".join(error.format_message().split())
            path = error.ctx.command_path if error.ctx else "baton"
            typer.echo(f"{path}: error: {message.rstrip('.')}; see {path} --help", err=True)
            raise SystemExit(EXIT_REFUSED) from None
        except StartupError as error:
            from baton.service import refuse

            raise SystemExit(refuse(ctx.invoked_subcommand or "", error)) from None
        except BatonError as error:
            request = f" [{error.request_id}]" if error.request_id else ""
            typer.echo(
                f"baton {ctx.invoked_subcommand}: {error.reason}: {error}{request}", err=True
            )
            raise SystemExit(1) from None


app = typer.Typer(
    name="baton",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"baton {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Serve Hugging Face language models from two tiers: prefill here, decode there."""
