"""Flags of sampling options, generated from their table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from baton.sampling_params import OPTIONS, SamplingParams, Texts, TokenBiases, TokenIds

_NAME = "params"
#: Options with several parts, for which commands define their own flags.
_COMPOSED = ("beam_search", "structured_output")

#: Additions to help texts.
_NOTES = {
    "n": "Several are printed when all have ended.",
    "logprobs": "Seen with --json.",
    "prompt_logprobs": "Seen with --json.",
}

#: Options that fit one flag.
FLAGS = tuple(
    name
    for name, option in OPTIONS.items()
    if name not in _COMPOSED and not isinstance(option.limits, TokenBiases)
)


def sampling_flags(
    names: Sequence[str] = FLAGS, **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command for typer, with one flag per option in place of its parameter `params`, which
    receives the SamplingParams. defaults: by flag."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            options: dict[str, Any] = {name: given.pop(name) for name in names}
            # An absent repeatable flag is an empty list.
            params = SamplingParams(**{k: v for k, v in options.items() if v != []})
            command(**given, **{_NAME: params})

        hints = get_type_hints(command, include_extras=True)
        parameters = [
            flag
            for name, parameter in inspect.signature(command).parameters.items()
            for flag in (
                [_flag(option, defaults.get(option)) for option in names]
                if name == _NAME
                else [
                    parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
                ]
            )
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


_TYPES = get_type_hints(SamplingParams)


def _flag(name: str, default: object) -> inspect.Parameter:
    option = OPTIONS[name]
    kind: Any = _TYPES[name]
    text = " ".join(filter(None, (option.describe(default), _NOTES.get(name))))
    match option.limits:
        case Texts():
            kind, text = list[str] | None, f"{text} May be repeated."
        case TokenIds():
            kind, text = list[int] | None, f"{text} May be repeated."
    # Typer would give a one-letter flag a single dash.
    flags = (f"--{name}",) if len(name) == 1 else ()
    annotation = Annotated[kind, typer.Option(*flags, help=text, show_default=False)]
    parameter_kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, parameter_kind, default=default, annotation=annotation)
