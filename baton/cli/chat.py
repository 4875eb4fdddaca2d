"""`baton chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options
from baton.cli.connection import Connection, connecting
from baton.errors import BatonError

if TYPE_CHECKING:
    from baton.client import CompletionStream

_HELP = "Ctrl-C stops an answer; /reset begins anew; /exit or Ctrl-D ends."


@connecting
def chat(
    connection: Connection,
    model: options.Model = "",
    system: Annotated[str, typer.Option(help="System message to begin with.")] = "",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
) -> None:
    """Talk with the model; the conversation is kept."""
    from baton.client import ChatMessage, SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
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
    """The next line, or None at the end of input; Ctrl-C gives an empty line."""
    try:
        return input(prompt)
    except EOFError:
        return None
    except KeyboardInterrupt:
        typer.echo()
        return ""


def _print_answer(stream: CompletionStream) -> str:
    """Print the answer as it comes and return it, or what there was of it when Ctrl-C stopped
    it."""
    pieces: list[str] = []
    try:
        for chunk in stream:
            pieces.append(chunk.text)
            typer.echo(chunk.text, nl=False)
    except KeyboardInterrupt:
        stream.close()
    typer.echo()
    return "".join(pieces)
