"""API keys of this gateway's clients, and their shares of the queue."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from baton.config import GatewayOptions
from baton.config.fields import API_KEY_FIX, is_api_key
from baton.errors import ConfigError

#: Bounds that catch mistakes: next to the maximum, a key of weight 1 would wait for a thousand
#: others.
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3

_WEIGHT_FIX = (
    f"give each line a key, and after a space weight=N if its share is to be another than 1, from "
    f"{MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
)


def read_api_keys(options: GatewayOptions) -> Mapping[str, float]:
    """Keys of the options, with weight 1, and of the file, with its weights. Empty serves every
    client. Raises ConfigError, without a key in its message."""
    keys = {key.get_secret_value(): 1.0 for key in options.api_key}
    if options.api_key_file is not None:
        keys |= _read(options.api_key_file)
    return MappingProxyType(keys)


def _read(path: str) -> dict[str, float]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        fix = f"cannot be read ({error.strerror}); give a file that this user may read"
        raise ConfigError.of("api_key_file", path, fix) from None
    except UnicodeDecodeError:
        raise ConfigError.of("api_key_file", path, API_KEY_FIX) from None
    keys: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        key, *rest = line.split() or [""]
        if not key:
            continue
        if not is_api_key(key):
            raise ConfigError.of("api_key_file", path, f"line {number}: {API_KEY_FIX}")
        if key in keys:
            raise ConfigError.of("api_key_file", path, f"line {number}: a key is there twice")
        keys[key] = _weight(rest, path, number)
    if not keys:
        # An empty file would open the gateway to everybody.
        raise ConfigError.of("api_key_file", path, "holds no key; write one per line")
    return keys


def _weight(rest: list[str], path: str, number: int) -> float:
    """Parse the text after a key in its line."""
    if not rest:
        return 1.0
    name, is_given, text = rest[0].partition("=")
    if len(rest) > 1 or name != "weight" or not is_given:
        # Not shown: it may be the rest of a key that contains a space.
        raise ConfigError.of("api_key_file", path, f"line {number}: {_WEIGHT_FIX}")
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:  # also refuses nan
        raise ConfigError.of(
            "api_key_file", path, f"line {number}: weight={text[:20]}: {_WEIGHT_FIX}"
        )
    return weight
