"""Server reflection under both names: tools try v1 first, older ones v1alpha.

grpcio-reflection serves v1alpha only. The two differ in the package name alone, not in their
messages.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]
    reflection,
    reflection_pb2,
    reflection_pb2_grpc,
)

_METHOD = "ServerReflectionInfo"


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Add reflection of these services, and of itself, to `server`."""
    alpha = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    stable = text_format.Parse(
        text_format.MessageToString(alpha).replace("v1alpha", "v1"), FileDescriptorProto()
    )
    # Clients that list the services request the file of each. Adding the same file again has no
    # effect.
    descriptor_pool.Default().AddSerializedFile(stable.SerializeToString())
    names = [f"{file.package}.{file.service[0].name}" for file in (alpha, stable)]
    servicer = reflection.aio.ReflectionServicer((*service_names, *names))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler(names[1], {_METHOD: handler})
    server.add_generic_rpc_handlers((handlers,))
