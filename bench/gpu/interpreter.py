"""Triton's interpreter: kernels on CPU tensors, slowly. On if TRITON_INTERPRET=1 when Triton is
imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from baton_kernels.dispatch import Op
from bench.gpu.setting import Setting


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Within, ops take the kernels for CUDA wherever their tensors are."""
    with patch.object(Op, "kernel", lambda op, _device_type: op._find("cuda")):
        yield


def on_kernels(setting: Setting) -> AbstractContextManager[None]:
    """Within, ops take the kernels for CUDA: in a dry run, too."""
    return kernels_on_cpu() if setting.is_dry else nullcontext()


def mend_interpreter() -> None:
    """Let loops run over loaded bounds: Triton 3.6 reads a scalar as int(array of one), which numpy
    2.4 refuses."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
