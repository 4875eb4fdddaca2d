"""`baton generate`: streams the completion of one prompt."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from baton.cli import options
from baton.cli.connection import Connection, connecting
from baton.cli.sampling import sampling_flags
from baton.cli.timing import render_timing
from baton.sampling_params import BeamSearch, SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from baton.client import Completion, CompletionStream


class EarlyStop(enum.Enum):
    """When a beam search with as many finished outputs as beams ends: if better ones are unlikely,
    at once, or when better ones are impossible."""

    LIKELY = "likely"
    ALWAYS = "always"
    NEVER = "never"


_EARLY_STOPPING: Mapping[EarlyStop, bool | Literal["never"]] = {
    EarlyStop.LIKELY: False,
    EarlyStop.ALWAYS: True,
    EarlyStop.NEVER: "never",
}


@connecting
@sampling_flags(max_tokens=128)
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to complete; - reads it from stdin.")],
    connection: Connection,
    params: SamplingParams,
    model: options.Model = "",
    is_chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message of a chat.")
    ] = False,
    is_json: options.Json = False,
    timing: Annotated[
        bool, typer.Option("--timing", help="Print where the time went, to stderr.")
    ] = False,
    timeout_s: options.TimeoutS = None,
    beam_width: Annotated[
        int | None, typer.Option(help="Search for the most probable output with so many beams.")
    ] = None,
    length_penalty: Annotated[
        float, typer.Option(help="With --beam-width: above 0 favours long outputs.")
    ] = 1.0,
    early_stopping: Annotated[
        EarlyStop, typer.Option(help="With --beam-width, when to end: likely, always or never.")
    ] = EarlyStop.LIKELY,
    json_schema: Annotated[
        str | None,
        typer.Option(help="JSON Schema that the output must satisfy; @FILE reads it from there."),
    ] = None,
    json_object: Annotated[
        bool, typer.Option("--json-object", help="The output must be a JSON object.")
    ] = False,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole output must match.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="Text that the output may be; to be repeated.")
    ] = None,
    grammar: Annotated[
        str | None,
        typer.Option(help="Grammar, in Lark's syntax, of the output; @FILE reads it from there."),
    ] = None,
) -> None:
    """Complete PROMPT and print the text as it streams."""
    from baton.client import ChatMessage

    structured_output = StructuredOutput(
        json_schema=_text_of(json_schema),
        json_object=json_object or None,
        regex=regex,
        choice=choice or None,
        grammar=_text_of(grammar),
    )
    beam_search = (
        None
        if beam_width is None
        else BeamSearch(beam_width, length_penalty, _EARLY_STOPPING[early_stopping])
    )

    text = sys.stdin.read() if prompt == "-" else prompt
    params = params.with_options(
        beam_search=beam_search,
        structured_output=None if structured_output == StructuredOutput() else structured_output,
    )
    with (
        connection.client() as client,
        client.stream(
            [ChatMessage("user", text)] if is_chat else text,
            params,
            model=model,
            timeout_s=timeout_s,
        ) as stream,
    ):
        if is_json or (params.n or 1) > 1:
            completion = stream.collect()
            typer.echo(json.dumps(_as_json(completion)) if is_json else _as_text(completion))
            if timing:
                typer.echo(render_timing(completion.timing, completion.usage), err=True)
        else:
            _print_stream(stream, timing)


def _text_of(option: str | None) -> str | None:
    """The value of an option, or the content of the file named with @."""
    if option is None or not option.startswith("@"):
        return option
    try:
        return Path(option[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _print_stream(stream: CompletionStream, shows_timing: bool) -> None:
    last = None
    for chunk in stream:
        typer.echo(chunk.text, nl=False)
        last = chunk
    typer.echo()
    if shows_timing and last is not None and last.timing and last.usage:
        typer.echo(render_timing(last.timing, last.usage), err=True)


def _as_text(completion: Completion) -> str:
    """Each choice below a line with its number, and its score if present."""
    lines = []
    for choice in completion.choices:
        score = "" if choice.score is None else f", score {choice.score:.4f}"
        lines += [f"-- choice {choice.index}{score}", choice.text]
    return "\n".join(lines)


def _as_json(completion: Completion) -> dict[str, object]:
    """The completion as plain values: finish reasons by name; without scores if there are none."""
    entry = dataclasses.asdict(completion)
    for choice, shown in zip(completion.choices, entry["choices"], strict=True):
        shown["finish_reason"] = choice.finish_reason.name.lower()
        if choice.score is not None and not math.isfinite(choice.score):
            shown["score"] = None
    return entry
