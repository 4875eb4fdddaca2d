"""Triton's interpreter: runs kernels on CPU tensors, slowly. Enabled if TRITON_INTERPRET=1 when
Triton is imported."""

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
    """Make ops use the CUDA kernels for tensors on any device within the context."""
    with patch.object(Op, "kernel", lambda op, _device_type: op._find("cuda")):
        yield


def on_kernels(setting: Setting) -> AbstractContextManager[None]:
    """Make ops use the CUDA kernels within the context, in a dry run, too."""
    return kernels_on_cpu() if setting.is_dry else nullcontext()


def mend_interpreter() -> None:
    """Patch Triton 3.6's interpreter. Loops over loaded bounds: it reads a scalar as int(array of
    one), which numpy 2.4 refuses. Products: a row gets the same bits at any place in its tile, as
    on a GPU; numpy's matmul rounds rows by their place on CPUs without AVX-512."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = _create_dot


def _create_dot(_builder: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
    """Replaces InterpreterBuilder.create_dot: a @ b + d, with d's dtype."""
    from triton.runtime import interpreter

    left, right = (_values(operand).astype(d.data.dtype) for operand in (a, b))
    # einsum takes each sum separately, in the order of k.
    product = np.einsum("...mk,...kn->...mn", left, right, optimize=False)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _values(operand: Any) -> NDArray[Any]:
    """Values of a handle; float8 is stored as bits."""
    import triton.language as tl
    from triton.runtime import interpreter

    if operand.dtype.primitive_bitwidth == 8 and operand.dtype.is_floating():
        bits = interpreter._convert_float(operand.data, operand.dtype, tl.float16, None)
        return np.asarray(bits).view(np.float16)
    return np.asarray(operand.data)
