"""How a worker rounds."""

from __future__ import annotations

from baton.types import NumericsClass
from baton.v1 import numerics_pb2


def numerics_to_proto(numerics: NumericsClass) -> numerics_pb2.NumericsClass:
    return numerics_pb2.NumericsClass(
        device=numerics.device,
        level=numerics.level,
        dtype=numerics.dtype,
        kernels=numerics.kernels,
    )


def numerics_from_proto(message: numerics_pb2.NumericsClass) -> NumericsClass:
    return NumericsClass(message.device, message.level, message.dtype, message.kernels)
