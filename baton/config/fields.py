"""Types of option values: parsing, validation and redaction."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from baton.kv_transports import AUTO, REMOTE
from baton.rpc.address import is_address
from baton.types import MAX_WHITESPACE

_BYTE_FACTORS: Mapping[str, int] = MappingProxyType(
    {"": 1, "B": 1}
    | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
    | {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
    | {letter: 1024**power for power, letter in enumerate("KMGT", start=1)}
    | {letter: 1000**power for power, letter in enumerate("kmgt", start=1)}
)
_BYTE_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_byte_size(value: object) -> object:
    """Parse a number of bytes such as "512MiB", "2GB", "1.5G" or "4096"; values of other types are
    returned unchanged.

    MiB and M are 1024-based, MB and m are 1000-based, likewise for the other letters. Raises
    ValueError.
    """
    if not isinstance(value, str):
        return value
    match = _BYTE_SIZE.fullmatch(value)
    if match is None or match[2] not in _BYTE_FACTORS:
        raise ValueError("give a number of bytes, like 536870912, 512MiB or 2GB")
    return int(Decimal(match[1]) * _BYTE_FACTORS[match[2]])


LogLevel = Literal["debug", "info", "warning", "error"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ModelImpl = Literal["auto", "baton", "transformers"]
_ATTENTION_BACKENDS = ("auto", "triton", "sdpa", "varlen", "flash-attn", "flashinfer")
#: Kinds of engine.sparse.
_SPARSE_KINDS = ("sink-window", "pages")
KvDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]
if TYPE_CHECKING:
    Transport = str
else:
    #: Type checkers accept only a literal spelled out.
    Transport = Literal[(AUTO, *(each.name for each in REMOTE))]


def _json_object(value: object) -> object:
    """JSON text of an object, which is given as text or, in a YAML file, as itself."""
    with suppress(ValueError, RecursionError):
        parsed = json.loads(value) if isinstance(value, str) else value
        if isinstance(parsed, dict):
            return json.dumps(parsed, separators=(",", ":"))
    raise ValueError("give a JSON object, like '{\"name\": 1}'")


NonEmpty = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
JsonWhitespace = Annotated[int, Field(ge=0, le=MAX_WHITESPACE)]
MaxLogprobs = Annotated[int, Field(ge=-1)]
#: JSON text of an object.
JsonObject = Annotated[
    str, BeforeValidator(_json_object), Field(json_schema_extra={"metavar": "JSON"})
]
Port = Annotated[int, Field(ge=0, le=65535)]
BlockSize = Annotated[int, Field(ge=1, le=256)]
Seconds = Annotated[float, Field(gt=0)]
Milliseconds = Annotated[float, Field(gt=0)]
ByteSize = Annotated[int, BeforeValidator(parse_byte_size), Field(ge=1)]
FileDescriptor = Annotated[int, Field(ge=0)]

API_KEY_FIX = "give keys of printable ASCII, without spaces and commas"

HIDDEN: dict[str, Any] = {"hidden": True}
#: Metadata of a field that may contain a password: passed to other processes only by environment.
PRIVATE: dict[str, Any] = {"private": True}
#: Metadata of a private field that is never shown.
SECRET: dict[str, Any] = {"secret": True, **PRIVATE}

#: Numbers used by uvicorn and vLLM.
_CERT_REQS = {"0": "none", "2": "required"}


def split_commas(value: object) -> object:
    """Split ["a,b", "c"] or "a,b,c" into its non-empty parts."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return [piece.strip() for part in value for piece in part.split(",") if piece.strip()]
    return value


def _check_address(address: str) -> str:
    if not is_address(address):
        raise ValueError(f"{address!r} is no address; give host:port, with an IPv6 host in []")
    return address


def _check_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        _check_address(address)
    if len(set(addresses)) != len(addresses):
        raise ValueError("give each address once")
    return addresses


def _check_pairs(what: str, form: str) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    """Check pairs NAME=VALUE; `what` and `form` describe them in errors."""

    def check(pairs: tuple[str, ...]) -> tuple[str, ...]:
        names = []
        for pair in pairs:
            name, _, value = pair.partition("=")
            if not (name.strip() and value.strip()):
                raise ValueError(f"{pair!r} is no {what}; give {form}")
            names.append(name)
        if len(set(names)) != len(names):
            raise ValueError("give each name once")
        return pairs

    return check


def _check_registry(url: str) -> str:
    if re.fullmatch(r"rediss?://[^\s/?#]+(/\d+)?", url, re.ASCII) is None:
        raise ValueError("give redis://host:port/db, special characters of a password as %XX")
    return url


def _check_api_keys(keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    if not all(is_api_key(key.get_secret_value()) for key in keys):
        raise ValueError(API_KEY_FIX)
    return keys


def is_api_key(text: str) -> bool:
    """Whether a header and a comma-separated list can contain the key."""
    return re.fullmatch(r"[!-+\--~]+", text, re.ASCII) is not None


def _cert_reqs(value: object) -> object:
    return _CERT_REQS.get(str(value), value)


def _check_device(device: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device, re.ASCII) is None:
        raise ValueError("give auto, cpu, cuda or cuda:N")
    return device


_SLO_CLASS = "NAME=TTFT_MS:TPOT_MS"


def _check_slo_classes(classes: tuple[str, ...]) -> tuple[str, ...]:
    number = r"(\d{1,9}(\.\d{1,6})?)?"
    for each in classes:
        name, _, targets = each.partition("=")
        is_named = re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII)
        is_number = re.fullmatch(f"{number}:{number}", targets, re.ASCII)
        if not (is_named and is_number and any(c in "123456789" for c in targets)):
            raise ValueError(
                f"{each!r}: give {_SLO_CLASS}, such as interactive=300:30, in milliseconds; one of "
                "the two may be left out, and is that of the deployment then"
            )
    return classes


#: Worker addresses, "host:port"; repeated option or comma-separated.
Addresses = Annotated[
    tuple[str, ...],
    BeforeValidator(split_commas),
    AfterValidator(_check_addresses),
    Field(json_schema_extra={"metavar": "HOST:PORT"}),
]


#: redis://[user:password@]host:port/db, or rediss:// for TLS.
RegistryUrl = Annotated[str, AfterValidator(_check_registry)]


#: API keys; repeated option or comma-separated.
ApiKeys = Annotated[
    tuple[SecretStr, ...],
    BeforeValidator(split_commas),
    AfterValidator(_check_api_keys),
]

#: Names; repeated option or comma-separated.
Names = Annotated[
    tuple[NonEmpty, ...],
    BeforeValidator(split_commas),
    Field(json_schema_extra={"metavar": "NAME"}),
]

#: Adapters, NAME=PATH; repeated option or comma-separated.
LoraModules = Annotated[
    tuple[str, ...],
    BeforeValidator(split_commas),
    AfterValidator(_check_pairs("adapter", "NAME=PATH")),
    Field(json_schema_extra={"metavar": "NAME=PATH"}),
]

#: Classes of requests, NAME=TTFT_MS:TPOT_MS; repeated option or comma-separated.
SloClasses = Annotated[
    tuple[str, ...],
    BeforeValidator(split_commas),
    AfterValidator(_check_pairs("class", _SLO_CLASS)),
    AfterValidator(_check_slo_classes),
    Field(json_schema_extra={"metavar": _SLO_CLASS}),
]

#: Names in certificates.
PeerNames = Names

CertReqs = Annotated[Literal["none", "required"], BeforeValidator(_cert_reqs)]

#: GPU numbers; repeated option or comma-separated.
Devices = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(split_commas),
    Field(json_schema_extra={"metavar": "N"}),
]


def _check_attention_backend(name: str) -> str:
    kind, _, tokens = name.partition(":")
    is_sparse = kind in _SPARSE_KINDS and tokens.isdecimal() and len(tokens) < 10
    if name not in _ATTENTION_BACKENDS and not is_sparse:
        sparse = " or ".join(f"{kind}:TOKENS" for kind in _SPARSE_KINDS)
        raise ValueError(f"give {', '.join(_ATTENTION_BACKENDS)}, {sparse}")
    return name


AttentionBackendName = Annotated[str, AfterValidator(_check_attention_backend)]

Address = Annotated[NonEmpty, AfterValidator(_check_address)]
Device = Annotated[str, AfterValidator(_check_device)]
