"""Triton's interpreter: kernels on CPU tensors, slowly. On if TRITON_INTERPRET=1 when Triton is imported."""

from __future__ import annotations

from typing import Any


def mend_interpreter() -> None:
    """Let loops run over loaded bounds: Triton 3.6 reads a scalar as int(array of one), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
