"""`baton chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options
from baton.cli.connection import Connection, connecting
from baton.cli.sampling import sampling_flags
from baton.errors import BatonError
from baton.sampling_params import SamplingParams

if TYPE_CHECKING:
    from baton.client import CompletionStream

_HELP = "Ctrl-C stops an answer; /reset begins anew; /exit or Ctrl-D ends."


@connecting
@sampling_flags(("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"))
def chat(
    connection: Connection,
    params: SamplingParams,
    model: options.Model = "",
    system: Annotated[str, typer.Option(help="System message to begin with.")] = "",
) -> None:
    """Chat with the model in the terminal. Earlier messages stay in the context."""
    from baton.client import ChatMessage

    first = [ChatMessage("system", system)] if system else []
    messages = list(first)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # gives input() line editing

        typer.echo(_HELP, err=True)
    with connection.client() as client:
        while (text := _read("> " if is_terminal else "")) is not None:
            if text == "/exit":
                return
            if text == "/reset":
                messages = list(first)
            elif text.strip():
                asked = [*messages, ChatMessage("user", text)]
                try:
                    with client.stream(asked, params, model=model) as stream:
                        answer = _print_answer(stream)
                except BatonError as error:
                    typer.echo(f"{error.reason}: {error}", err=True)
                else:
                    messages = [*asked, ChatMessage("assistant", answer)]


def _read(prompt: str) -> str | None:
    """The next line; None at the end of input; empty after Ctrl-C."""
    try:
        return input(prompt)
    except EOFError:
        return None
    except KeyboardInterrupt:
        typer.echo()
        return ""


def _print_answer(stream: CompletionStream) -> str:
    """Print the answer as it streams. Returns it, truncated if Ctrl-C stopped it."""
    pieces: list[str] = []
    try:
        for chunk in stream:
            pieces.append(chunk.text)
            typer.echo(chunk.text, nl=False)
    except KeyboardInterrupt:
        stream.close()
    typer.echo()
    return "".join(pieces)
