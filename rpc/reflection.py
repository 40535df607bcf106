"""Server reflection in both versions that tools speak: v1 and, before it, v1alpha. Their messages are the same.

grpcio-reflection brings v1alpha only; v1 is that servicer under its own name, with a descriptor made from v1alpha's.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA_PACKAGE, V1_PACKAGE = "grpc.reflection.v1alpha", "grpc.reflection.v1"
V1_FILE = "grpc/reflection/v1/reflection.proto"
V1_NAME = f"{V1_PACKAGE}.ServerReflection"
V1ALPHA_NAME: str = reflection.SERVICE_NAME


def add_reflection(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Makes `names` and the reflection services themselves known to clients that ask."""
    pool = _pool()
    all_names = [*names, V1ALPHA_NAME, V1_NAME]
    reflection.enable_server_reflection(all_names, server, pool)
    servicer = reflection.aio.ReflectionServicer(all_names, pool)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler(V1_NAME, {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((handlers,))


def _pool() -> descriptor_pool.DescriptorPool:
    """Returns the default pool, with the v1 descriptor in it."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(V1_FILE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        pool.Add(_renamed(file))
    return pool


def _renamed(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    file.name, file.package = V1_FILE, V1_PACKAGE
    old, new = f".{V1ALPHA_PACKAGE}.", f".{V1_PACKAGE}."
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(old, new)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(old, new)
            method.output_type = method.output_type.replace(old, new)
    return file
