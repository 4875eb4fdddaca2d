"""A worker's registry entry and its JSON form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from baton.rpc.address import is_address
from baton.types import WorkerInfo, WorkerLoad
from baton.v1 import worker_pb2
from baton.wire import info_from_proto, info_to_proto, load_from_proto, load_to_proto

#: Larger entries are ignored as foreign.
MAX_ENTRY_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker that can be found.

    address: host:port of its gRPC services, as gateways reach it.
    transports: ways by which it can receive or send KV.
    load: at the last renewal; connected gateways have newer values.
    """

    address: str
    info: WorkerInfo
    transports: tuple[str, ...]
    load: WorkerLoad


def to_json(registration: Registration) -> str:
    """One line of JSON with sorted keys. Readers skip unknown fields."""
    load = load_to_proto(registration.load)
    entry = {
        "address": registration.address,
        "info": _to_dict(info_to_proto(registration.info)),
        "transports": list(registration.transports),
        "load": _to_dict(load),
    }
    return json.dumps(entry, sort_keys=True, separators=(",", ":"))


def from_json(text: str | bytes) -> Registration:
    """The inverse of to_json. Raises ValueError for invalid entries."""
    if len(text) > MAX_ENTRY_BYTES:
        raise ValueError(f"{len(text)} bytes are too many")
    try:
        entry = _object(json.loads(text))
    except RecursionError:
        raise ValueError("too deep") from None
    address, transports = entry.get("address"), entry.get("transports")
    if not (isinstance(address, str) and is_address(address)):
        raise ValueError("no address")
    if not (isinstance(transports, list) and all(isinstance(name, str) for name in transports)):
        raise ValueError("no transports")
    info = worker_pb2.GetWorkerInfoResponse()
    load = worker_pb2.WatchLoadResponse()
    _parse(entry.get("info"), info)
    _parse(entry.get("load"), load)
    return Registration(address, info_from_proto(info), tuple(transports), load_from_proto(load))


def _to_dict(message: Any) -> Any:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError("no object where one should be")


def _parse(value: object, message: Any) -> None:
    fields = _object(value)
    try:
        json_format.ParseDict(fields, message, ignore_unknown_fields=True, max_recursion_depth=10)
    except json_format.ParseError as error:
        raise ValueError(str(error)) from None
