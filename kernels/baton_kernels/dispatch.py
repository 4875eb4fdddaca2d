"""An op: a plain torch twin that runs anywhere, and a faster kernel for the device types that have
one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Generic, ParamSpec, TypeVar

import torch

from baton_kernels.cpu.library import library

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """Runs the kernel for the device type of the first tensor argument, or the twin if there is
    none.

    The twin is the definition: a kernel is correct if it agrees with it. For a twin in
    baton_kernels.X, the CUDA kernel is the function of the same name in baton_kernels.gpu.X (if
    Triton is installed), and the CPU kernel that in baton_kernels.cpu.X (if the native library is
    built). Both are imported at first use.
    """

    def __init__(self, twin: Callable[P, R]) -> None:
        self.twin = twin
        self._kernels: dict[str, Callable[P, R]] = {}
        self.__doc__ = twin.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                return self.kernel(arg.device.type)(*args, **kwargs)
        return self.twin(*args, **kwargs)

    def kernel(self, device_type: str) -> Callable[P, R]:
        """The function that runs for tensors of a device type."""
        found = self._kernels.get(device_type)
        if found is None:
            found = self._find(device_type)
            self._kernels[device_type] = found
        return found

    def _find(self, device_type: str) -> Callable[P, R]:
        folder = _kernel_folder(device_type)
        if folder is None:
            return self.twin
        package, _, name = self.twin.__module__.rpartition(".")
        module_name = f"{package}.{folder}.{name}"
        if find_spec(module_name) is None:
            return self.twin
        module = importlib.import_module(module_name)
        kernel: Callable[P, R] | None = getattr(module, self.twin.__name__, None)
        if kernel is None:
            return self.twin
        return on_its_device(kernel) if device_type == "cuda" else kernel


def _kernel_folder(device_type: str) -> str | None:
    """The package with a device type's kernels, or None if they cannot run here."""
    if device_type == "cuda" and find_spec("triton") is not None:
        return "gpu"
    if device_type == "cpu" and library() is not None:
        return "cpu"
    return None


def on_its_device(kernel: Callable[P, R]) -> Callable[P, R]:
    """Wrap a kernel so that Triton launches on the tensors' device, not on the thread's current
    one."""

    @functools.wraps(kernel)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            return kernel(*args, **kwargs)

    return run


def op(twin: Callable[P, R]) -> Op[P, R]:
    """Make an op of its twin. At least one tensor must be passed by position."""
    return Op(twin)
