"""The keys that clients of this gateway may show."""

from __future__ import annotations

from pathlib import Path

from baton.config import GatewayOptions
from baton.config.fields import API_KEY_FIX, is_api_key
from baton.errors import ConfigError


def read_api_keys(options: GatewayOptions) -> tuple[str, ...]:
    """Those given, and those of the file. None at all: every client is served. Raises ConfigError,
    without a key in it."""
    given = tuple(key.get_secret_value() for key in options.api_key)
    return given if options.api_key_file is None else (*given, *_read(options.api_key_file))


def _read(path: str) -> tuple[str, ...]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        fix = f"cannot be read ({error.strerror}); give a file that this user may read"
        raise ConfigError.of("api_key_file", path, fix) from None
    except UnicodeDecodeError:
        raise ConfigError.of("api_key_file", path, API_KEY_FIX) from None
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        # An empty file would open the gateway to everybody.
        raise ConfigError.of("api_key_file", path, "holds no key; write one per line")
    if not all(map(is_api_key, keys)):
        raise ConfigError.of("api_key_file", path, API_KEY_FIX)
    return keys
