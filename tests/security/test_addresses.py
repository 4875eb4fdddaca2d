"""Where anything connects to is never in a request: peers come from options, the registry and
tickets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.v1 import inference_pb2, kv_pb2

ADDRESS = re.compile(r"address|host|endpoint|url|uri|port|path|file|socket", re.IGNORECASE)


def fields_of(message: Descriptor, seen: set[str]) -> Iterator[FieldDescriptor]:
    """All fields of a message, and of the messages within it."""
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield field
        if field.message_type is not None:
            yield from fields_of(field.message_type, seen)


def addresses_in(message: Descriptor) -> set[str]:
    return {f.full_name for f in fields_of(message, set()) if ADDRESS.search(f.name)}


def test_no_request_of_a_client_names_an_address() -> None:
    service = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    assert service.methods
    for method in service.methods:
        assert addresses_in(method.input_type) == set(), method.name


def test_the_walk_finds_addresses_where_there_are_some() -> None:
    assert "baton.v1.KvEndpoint.address" in addresses_in(kv_pb2.KvTicket.DESCRIPTOR)
