"""Triton's interpreter: kernels on CPU tensors, slowly. On if TRITON_INTERPRET=1 when Triton is
imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

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
    2.4 refuses. And let a row of a product have the same bits wherever it is in its tile, as on a
    GPU: numpy's matmul rounds rows by their place, on CPUs without AVX-512."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = _create_dot


def _create_dot(_builder: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
    """In place of InterpreterBuilder.create_dot: a @ b + d, of the type of d."""
    from triton.runtime import interpreter

    left, right = (_values(operand).astype(d.data.dtype) for operand in (a, b))
    # Each of its sums is taken on its own, in the order of k.
    product = np.einsum("...mk,...kn->...mn", left, right, optimize=False)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _values(operand: Any) -> NDArray[Any]:
    """Of a handle, whose float8 is kept as its bits."""
    import triton.language as tl
    from triton.runtime import interpreter

    if operand.dtype.primitive_bitwidth == 8 and operand.dtype.is_floating():
        bits = interpreter._convert_float(operand.data, operand.dtype, tl.float16, None)
        return np.asarray(bits).view(np.float16)
    return np.asarray(operand.data)
