"""Loads options: flags, then environment (BATON_*), then a YAML file, then defaults.

pydantic-settings reads the environment. Its YAML source and its merging are not used: errors here
name the option in the spelling of its source, and files may write `block-size` for `block_size`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from baton.config.options import Options
from baton.errors import ConfigError, StartupError

ENV_PREFIX = "BATON_"

#: Level of CPU kernels. Not an option, because it is needed before options are read; child
#: processes inherit it.
CPU_LEVEL_VARIABLE = "BATON_CPU_LEVEL"

#: BATON_ variables that are not options; clients read BATON_ADDRESS.
_OTHER_VARIABLES = frozenset({"BATON_ADDRESS", CPU_LEVEL_VARIABLE})

#: Words in variable names that mark their values as secret.
_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASS")
_HIDDEN_VALUE = "***"

#: Fixes by pydantic's error type; other errors contain their own.
_FIXES: Mapping[str, str] = MappingProxyType(
    {
        "greater_than_equal": "give at least {ge}",
        "greater_than": "give more than {gt}",
        "less_than_equal": "give at most {le}",
        "literal_error": "give {expected}",
        "string_too_short": "give a text that is not empty",
        "string_type": "give a text",
        "int_parsing": "give a whole number",
        "int_parsing_size": "give a smaller whole number",
        "int_type": "give a whole number",
        "int_from_float": "give a whole number",
        "float_parsing": "give a number",
        "float_type": "give a number",
        "finite_number": "give a finite number",
        "bool_parsing": "give true or false",
        "bool_type": "give true or false",
    }
)

O = TypeVar("O", bound=Options)  # noqa: E741


def flag_of(name: str) -> str:
    """Command-line spelling of the option `name`; the model is the one positional argument, and a
    switch `is_x` is spelled --x."""
    return "MODEL" if name == "model" else "--" + name.removeprefix("is_").replace("_", "-")


def is_switch(field: FieldInfo) -> bool:
    """Whether an option is boolean, or an optional boolean."""
    return field.annotation in (bool, bool | None)


def is_secret(cls: type[Options], name: str) -> bool:
    """Whether the value of the option `name` is a secret."""
    return _is_marked(cls, name, "secret")


def is_private(cls: type[Options], name: str) -> bool:
    """Whether the option `name` must be kept off command lines."""
    return _is_marked(cls, name, "private")


def _is_marked(cls: type[Options], name: str, mark: str) -> bool:
    field = cls.model_fields.get(name)
    extra = field.json_schema_extra if field else None
    return isinstance(extra, dict) and bool(extra.get(mark))


def as_told(error: StartupError) -> str:
    """The error's message on one line, with options spelled as on the command line."""
    message = " ".join(error.message.split())
    option = error.metadata.get("option", "")
    if option.isidentifier() and option.islower() and message.startswith(f"{option}="):
        message = flag_of(option) + message.removeprefix(option)
    return message


def load_options(cls: type[O], flags: Mapping[str, object], config_file: Path | None = None) -> O:
    """Load the options of a command. `flags`: values from the command line by field name.

    Raises ConfigError naming option, value and fix, in the spelling of the option's source.
    """
    sources = (
        (flags, flag_of),
        (_from_environment(cls), lambda name: ENV_PREFIX + name.upper()),
        (_from_file(config_file) if config_file else {}, lambda name: f"{config_file}: {name}"),
    )
    values: dict[str, object] = {}
    spellings: dict[str, str] = {}
    for source, spell in sources:
        for name in source.keys() - values.keys():
            values[name] = source[name]
            spellings[name] = spell(name)
    return build_options(cls, values, spellings)


def build_options(
    cls: type[O], values: Mapping[str, object], spellings: Mapping[str, str] | None = None
) -> O:
    """Construct cls(**values). Raises ConfigError for the first fault that pydantic reports."""
    spellings = spellings or {}
    for name, value in values.items():
        field = cls.model_fields.get(name)
        if isinstance(value, bool) and field and not is_switch(field):
            option = spellings.get(name, flag_of(name))
            raise ConfigError.of(option, value, "give a value other than true or false")
    try:
        return cls(**values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise _config_error(cls, fault, spellings) from None


def _from_environment(cls: type[Options]) -> Mapping[str, object]:
    known = {name.upper() for options in _subclasses(Options) for name in options.model_fields}
    for variable, value in sorted(os.environ.items()):
        name = variable.removeprefix(ENV_PREFIX)
        if name != variable and name not in known and variable not in _OTHER_VARIABLES:
            shown = _HIDDEN_VALUE if _SECRET_NAME.search(name) else value
            raise ConfigError.of(variable, shown, f"no such option{_suggestion(name, known)}")
    torchrun = torchrun_options(os.environ) if "nnodes" in cls.model_fields else {}
    if not any(variable.startswith(ENV_PREFIX) for variable in os.environ):
        return torchrun
    # Imported on demand: slow, and needed only if such a variable is set.
    from pydantic_settings import BaseSettings, EnvSettingsSource

    source = EnvSettingsSource(
        cast("type[BaseSettings]", cls), case_sensitive=False, env_prefix=ENV_PREFIX
    )
    # Comma-separated text, split by the fields; not JSON.
    source.config = {**source.config, "enable_decoding": False}
    return {**torchrun, **source()}


def torchrun_options(environment: Mapping[str, str]) -> dict[str, object]:
    """Options of a worker's host by the environment of torchrun, which runs one process on each.
    Raises ConfigError."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return {}
    if environment["LOCAL_WORLD_SIZE"] != "1":
        fix = "one process on each host starts all ranks there; give torchrun --nproc-per-node 1"
        raise ConfigError.of("LOCAL_WORLD_SIZE", environment["LOCAL_WORLD_SIZE"], fix)
    return {
        "nnodes": environment["WORLD_SIZE"],
        "node_rank": environment["RANK"],
        "master_addr": environment["MASTER_ADDR"],
        # torchrun has its own store at MASTER_PORT.
        "master_port": int(environment["MASTER_PORT"]) + 1,
    }


def _from_file(path: Path) -> Mapping[str, object]:
    import yaml  # rarely needed, and slow to import

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("--config", path, f"give a readable file ({error})") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError.of("--config", path, f"give valid YAML ({reason})") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError.of("--config", path, "give one option per line, as name: value")
    values = {key.replace("-", "_"): value for key, value in content.items()}
    if len(values) != len(content):
        raise ConfigError.of("--config", path, "give each option once")
    return values


def _subclasses(cls: type[Options]) -> Iterator[type[Options]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _suggestion(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else "; leave it out"


def _config_error(
    cls: type[Options], fault: ErrorDetails, spellings: Mapping[str, str]
) -> ConfigError:
    if not fault["loc"]:
        return ConfigError(_message(fault), option="", value="", fix=_message(fault))
    name = str(fault["loc"][0])
    option = spellings.get(name, flag_of(name))
    if fault["type"] == "missing":
        return ConfigError(
            f"{option} is missing: give one", option=option, value="", fix="give one"
        )
    if fault["type"] == "extra_forbidden":
        fix = f"no such option{_suggestion(name, set(cls.model_fields))}"
        return ConfigError.of(option, fault["input"], fix)
    shown = _HIDDEN_VALUE if is_secret(cls, name) else fault["input"]
    return ConfigError.of(option, shown, _message(fault))


def _message(fault: ErrorDetails) -> str:
    """The fault and its fix, without the value."""
    template = _FIXES.get(fault["type"])
    if template is None:
        return fault["msg"].removeprefix("Value error, ")
    return template.format_map(fault.get("ctx", {}))
