"""API keys of this gateway's clients, their shares of the queue, and the classes of their
requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from baton.config import GatewayOptions
from baton.config.fields import API_KEY_FIX, is_api_key
from baton.errors import ConfigError

#: Bounds that catch mistakes: next to the maximum, a key of weight 1 would wait for a thousand
#: others.
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3

_WORDS_FIX = (
    f"give each line a key, and after spaces weight=N if its share is to be another than 1, from "
    f"{MIN_WEIGHT:g} to {MAX_WEIGHT:g}, and class=NAME for one of --slo-classes"
)


@dataclass(frozen=True, slots=True)
class KeySettings:
    """weight: share of the queue. slo_class: of requests that name none; empty for none."""

    weight: float = 1.0
    slo_class: str = ""


def read_api_keys(options: GatewayOptions) -> Mapping[str, KeySettings]:
    """Keys of the options, with weight 1 and without a class, and of the file. Empty serves every
    client. Raises ConfigError, without a key in its message."""
    keys = {key.get_secret_value(): KeySettings() for key in options.api_key}
    if options.api_key_file is not None:
        keys |= _read(options.api_key_file, options.slo_by_class)
    return MappingProxyType(keys)


def _read(path: str, classes: Collection[str]) -> dict[str, KeySettings]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        fix = f"cannot be read ({error.strerror}); give a file that this user may read"
        raise ConfigError.of("api_key_file", path, fix) from None
    except UnicodeDecodeError:
        raise ConfigError.of("api_key_file", path, API_KEY_FIX) from None
    keys: dict[str, KeySettings] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        key, *rest = line.split() or [""]
        if not key:
            continue
        if not is_api_key(key):
            raise ConfigError.of("api_key_file", path, f"line {number}: {API_KEY_FIX}")
        if key in keys:
            raise ConfigError.of("api_key_file", path, f"line {number}: a key is there twice")
        keys[key] = _settings(rest, classes, path, number)
    if not keys:
        # An empty file would open the gateway to everybody.
        raise ConfigError.of("api_key_file", path, "holds no key; write one per line")
    return keys


def _settings(words: list[str], classes: Collection[str], path: str, number: int) -> KeySettings:
    """Parse the words after a key in its line."""
    given = dict(word.partition("=")[::2] for word in words)
    if len(given) < len(words) or not given.keys() <= {"weight", "class"}:
        # Not shown: it may be the rest of a key that contains a space.
        raise ConfigError.of("api_key_file", path, f"line {number}: {_WORDS_FIX}")
    text, slo_class = given.get("weight", "1"), given.get("class", "")
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:  # also refuses nan
        raise ConfigError.of(
            "api_key_file", path, f"line {number}: weight={text[:20]}: {_WORDS_FIX}"
        )
    if "class" in given and slo_class not in classes:
        known = f"one of {', '.join(classes)}" if classes else "none: there are no --slo-classes"
        raise ConfigError.of(
            "api_key_file", path, f"line {number}: class={slo_class[:64]}: give {known}"
        )
    return KeySettings(weight, slo_class)
