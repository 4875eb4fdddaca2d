"""`baton generate`: one prompt, streamed."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options
from baton.cli.timing import render_timing

if TYPE_CHECKING:
    from baton.client import Completion, CompletionStream


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to complete; - reads it from stdin.")],
    address: options.Address = options.DEFAULT_ADDRESS,
    model: options.Model = "",
    is_chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message of a chat.")
    ] = False,
    is_json: options.Json = False,
    timing: Annotated[
        bool, typer.Option("--timing", help="Tell where the time went, on stderr.")
    ] = False,
    timeout_s: options.TimeoutS = None,
    max_tokens: options.MaxTokens = 128,
    min_tokens: Annotated[int | None, typer.Option(help="Fewest tokens to produce.")] = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is neutral.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="0 is neutral.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="0 is neutral.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option(help="Token that ends the output; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool | None, typer.Option(help="Go on after the model's end-of-sequence token.")
    ] = None,
    seed: options.Seed = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Alternatives told per position; seen with --json.")
    ] = None,
    include_stop_str_in_output: Annotated[
        bool | None, typer.Option(help="Keep the stop text in the output.")
    ] = None,
    skip_special_tokens: Annotated[
        bool | None, typer.Option(help="Leave special tokens out of the text.")
    ] = None,
) -> None:
    """Complete PROMPT and print the text as it comes."""
    from baton.client import ChatMessage, Client, SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop or None,
        stop_token_ids=stop_token_ids or None,
        ignore_eos=ignore_eos,
        seed=seed,
        logprobs=logprobs,
        include_stop_str_in_output=include_stop_str_in_output,
        skip_special_tokens=skip_special_tokens,
    )
    with (
        Client(address) as client,
        client.stream(
            [ChatMessage("user", text)] if is_chat else text,
            params,
            model=model,
            timeout_s=timeout_s,
        ) as stream,
    ):
        if is_json:
            completion = stream.collect()
            typer.echo(json.dumps(_as_json(completion)))
            if timing:
                typer.echo(render_timing(completion.timing, completion.usage), err=True)
        else:
            _print_stream(stream, timing)


def _print_stream(stream: CompletionStream, shows_timing: bool) -> None:
    last = None
    for chunk in stream:
        typer.echo(chunk.text, nl=False)
        last = chunk
    typer.echo()
    if shows_timing and last is not None and last.timing and last.usage:
        typer.echo(render_timing(last.timing, last.usage), err=True)


def _as_json(completion: Completion) -> dict[str, object]:
    """The completion as plain values; finish reasons by name."""
    entry = dataclasses.asdict(completion)
    for choice, told in zip(completion.choices, entry["choices"], strict=True):
        told["finish_reason"] = choice.finish_reason.name.lower()
    return entry
