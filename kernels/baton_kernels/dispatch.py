"""An op: a plain torch twin that runs anywhere, and faster kernels for the device types that have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """Calls the kernel of its first argument's device type, or the twin where there is none.

    The twin is the definition: a kernel is right if it agrees with it.
    """

    def __init__(self, twin: Callable[P, R]) -> None:
        self.twin = twin
        self.kernels: dict[str, Callable[P, R]] = {}
        self.__doc__ = twin.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        device = first.device.type if isinstance(first, torch.Tensor) else "cpu"
        return self.kernels.get(device, self.twin)(*args, **kwargs)


def op(twin: Callable[P, R]) -> Op[P, R]:
    """Make an op of its twin. The first argument must be a tensor, passed by position."""
    return Op(twin)
