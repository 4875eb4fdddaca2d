"""The options that a command line and an environment give, as the process itself would read
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.config import DecodeOptions, GatewayOptions, Options, PrefillOptions
from baton.config.load import ENV_PREFIX, build_options

CLASSES: Mapping[str, type[Options]] = {
    "gateway": GatewayOptions,
    "prefill": PrefillOptions,
    "decode": DecodeOptions,
}


def options_of(command: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Options of `baton VERB --name=value --flag ... MODEL`. Raises ConfigError for what the
    process would refuse."""
    verb, *flags, model = command
    values: dict[str, object] = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENV_PREFIX)
    }
    for flag in flags:
        name, equals, value = flag.removeprefix("--").partition("=")
        values[name.replace("-", "_")] = value if equals else True
    return build_options(CLASSES[verb], {**values, "model": model})
