"""Command lines generated from options classes, so that flags and fields cannot diverge.

Flags are parsed as text and validated only by the options class. Omitted flags stay unset, so that
the environment and the configuration file apply.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from baton.config.load import (
    ENV_PREFIX,
    flag_of,
    is_private,
    is_secret,
    is_switch,
    load_options,
)
from baton.config.named_models import named_model
from baton.config.options import Options
from baton.errors import ConfigError

O = TypeVar("O", bound=Options)  # noqa: E741

#: Rarely needed options: listed by --help-all, not by --help.
ADVANCED = frozenset(
    {
        *("client_stall_timeout_s", "worker_stall_timeout_s", "ticket_lease_s", "ticket_offer_s"),
        *("kv_disk_dir", "kv_disk_bytes", "kv_store_url"),
        *("kv_num_lanes", "kv_transfer_dtype", "advertise_host"),
        *("max_cudagraph_capture_size", "enforce_eager", "async_scheduling", "reuse_port"),
        *("oracle_step_ms", "oracle_token_us", "oracle_window", "oracle_has_states"),
        *("max_local_prefill_tokens", "num_gpu_blocks_override", "max_lora_rank"),
        *("prefill_block_size", "decode_block_size", "prefill_gpu_memory_utilization"),
        *("prefill_tensor_parallel_size", "decode_tensor_parallel_size"),
        *("prefill_pipeline_parallel_size", "decode_pipeline_parallel_size"),
        *("enable_expert_parallel", "expert_load_file", "distributed_backend", "kv_per_rank"),
        *("data_parallel_size", "numa_node"),
        *("tensor_parallel_cut", "context_parallel_size", "kv_host_bytes", "chat_template"),
        *("speculative_tree", "enable_openengine", "allowed_origins"),
        *("ssl_server_name", "ssl_peer_names", "ssl_cert_reqs", "metrics_compat"),
        *("rope_scaling", "hf_overrides", "root_path", "enable_per_request_metrics"),
        *("max_remembered_prefixes", "max_json_whitespace", "max_logprobs"),
        *("response_store_bytes", "response_store_s"),
        *("min_workers", "max_workers", "slo_classes"),
    }
)
#: Heading of advanced options in --help-all.
ADVANCED_PANEL = "Advanced"

_CONFIG_HELP = (
    "YAML file of options, one per line as name: value. Flags and BATON_* variables go before it."
)


def option_command(cls: type[O], run: Callable[[O], None], doc: str) -> Callable[..., None]:
    """Function for typer's `command()` with one flag per field of `cls`; loads the options and
    calls `run`."""

    def command(config: Path | None = None, **flags: object) -> None:
        given = {name: value for name, value in flags.items() if value is not None and value != []}
        if isinstance(models := given.get("model"), list):
            given |= _first_and_further(models, given.get("more_models") or [])
        run(load_options(cls, given, config))

    parameters = [*_parameters(cls), _config_parameter(), _help_all_parameter()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = doc
    return command


def _first_and_further(models: list[str], more_models: Any) -> dict[str, object]:
    """Split the MODEL arguments: the first model, its name if given, and the further ones. A single
    existing folder has no name, even if its path contains "=". Raises ConfigError."""
    if len(models) == 1 and Path(models[0]).is_dir():
        return {"model": models[0]}
    try:
        first = named_model(models[0])
    except ValueError as error:
        raise ConfigError.of("MODEL", models[0], str(error)) from None
    if first.options:
        fix = "give options of the first MODEL as options of the command"
        raise ConfigError.of("MODEL", models[0], fix)
    given: dict[str, object] = {"model": first.model}
    if further := [*models[1:], *more_models]:
        given["more_models"] = further
    return given if first.name == first.model else {**given, "served_model_name": first.name}


def to_arguments(options: Options) -> list[str]:
    """Command line that reproduces these options, without unset and private ones."""
    arguments = [
        argument
        for name in type(options).model_fields
        if name in options.model_fields_set
        and name != "model"
        and not is_private(type(options), name)
        for argument in _arguments(name, getattr(options, name))
    ]
    model = getattr(options, "model", None)
    return arguments if model is None else [*arguments, "--", model]


def private_environment(options: Options) -> dict[str, str]:
    """Private options as environment variables, because other users can read command lines."""
    cls = type(options)
    return {
        ENV_PREFIX + name.upper(): _as_text(getattr(options, name))
        for name in cls.model_fields
        if name in options.model_fields_set
        and is_private(cls, name)
        and getattr(options, name) is not None
    }


def _as_text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_as_text, value))
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def _arguments(name: str, value: object) -> list[str]:
    flag = flag_of(name)
    match value:
        case None:
            return []
        case bool():
            return [flag if value else flag.replace("--", "--no-", 1)]
        case tuple():
            return [f"{flag}={part}" for part in value]
        case _:
            return [f"{flag}={value}"]


def _config_parameter() -> inspect.Parameter:
    annotation = Annotated[Path | None, typer.Option("--config", help=_CONFIG_HELP, metavar="FILE")]
    return _keyword("config", annotation)


def _help_all_parameter() -> inspect.Parameter:
    def show(context: typer.Context, is_wanted: bool | None) -> None:
        if not is_wanted or context.resilient_parsing:
            return
        for parameter in context.command.params:
            if getattr(parameter, "rich_help_panel", None) == ADVANCED_PANEL:
                parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit

    text = "Show all options, advanced ones too, and exit."
    option = typer.Option("--help-all", help=text, is_eager=True, callback=show)
    return _keyword("help_all", Annotated[bool | None, option])


def _parameters(cls: type[Options]) -> Iterator[inspect.Parameter]:
    for name, field in cls.model_fields.items():
        info: Any
        if name == "model":
            is_list = "more_models" in cls.model_fields
            metavar = "[NAME=]MODEL..." if is_list else "MODEL"
            info = typer.Argument(help=field.description, metavar=metavar, show_default=False)
            yield _keyword(name, Annotated[list[str] | None if is_list else str | None, info])
            continue
        flag = flag_of(name)
        is_bool = is_switch(field)
        info = typer.Option(
            f"{flag}/{flag.replace('--', '--no-', 1)}" if is_bool else flag,
            help=_help(field),
            metavar=None if is_bool else "KEY" if is_secret(cls, name) else _metavar(field),
            hidden=_is_hidden(field) or name in ADVANCED,
            rich_help_panel=ADVANCED_PANEL if name in ADVANCED else None,
            show_default=False,
        )
        yield _keyword(name, Annotated[_flag_type(field), info])


def _keyword(name: str, annotation: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _flag_type(field: FieldInfo) -> object:
    if is_switch(field):
        return bool | None
    return list[str] | None if get_origin(field.annotation) is tuple else str | None


def _is_hidden(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("hidden"))


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    if field.is_required() or field.default is None or field.default == ():
        return text
    default = field.default
    shown = ("yes" if default else "no") if isinstance(default, bool) else str(default)
    return f"{text} [default: {shown}]"


def _metavar(field: FieldInfo) -> str:
    annotation = _without_none(field.annotation)
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    if isinstance(extra := field.json_schema_extra, dict) and "metavar" in extra:
        return str(extra["metavar"])
    return {int: "INTEGER", float: "NUMBER"}.get(annotation, "TEXT")


def _without_none(annotation: Any) -> Any:
    """The type of an optional field's value, without bounds."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation
