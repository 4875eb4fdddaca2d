"""What multiplies while a model of transformers' runs: our kernels, or torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton_kernels.cpu.linear import NativeLinear
from baton_kernels.paged_attention import AttentionPlan, ScoreTerms
from engine.transformers import attention

#: torch's products, and which of their arguments is the first factor.
_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "matmul", "linear", "mv", "dot"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), 1),
}


attention_op = attention.paged_attention


class KernelWatch(TorchDispatchMode):
    """Sees the products that torch computes, but those of the twin of our attention; the others are
    noted down by what `watching` puts in place."""

    def __init__(self) -> None:
        super().__init__()
        self.native: set[str] = set()
        self.torch: set[str] = set()
        self.terms: set[str] = set()
        self._is_in_attention = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # Angles of rotary embeddings are outer products, of one term each.
        if name in _PRODUCTS and not self._is_in_attention and args[_PRODUCTS[name]].shape[-1] > 1:
            self.torch.add("products")
        return func(*args, **(kwargs or {}))

    def attend(self, *args: Any) -> torch.Tensor:
        """In place of paged_attention."""
        plan, terms = args[5], args[7]
        assert isinstance(terms, ScoreTerms)
        kind = self.torch if isinstance(plan, AttentionPlan) else self.native
        kind.add("attention")
        used = {
            "window": plan_window(plan) > 0,
            "soft-capping": terms.softcap is not None,
            "sinks": terms.sinks is not None,
            "ALiBi": terms.slopes is not None,
        }
        self.terms |= {name for name, is_used in used.items() if is_used}
        self._is_in_attention = True
        try:
            return attention_op(*args)
        finally:
            self._is_in_attention = False

    @property
    def summary(self) -> str:
        """In the words of docs/models.md."""
        terms = f" ({', '.join(sorted(self.terms))})" if self.terms else ""
        native, others = (
            ", ".join(name + terms * (name == "attention") for name in sorted(found))
            for found in (self.native, self.torch)
        )
        return "; ".join(filter(None, (native, others and f"torch: {others}")))


def plan_window(plan: Any) -> int:
    """The window of the layers that a plan is for; 0 for none."""
    return int(plan.window or 0) if isinstance(plan, AttentionPlan) else int(plan.call.window)


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelWatch]:
    """While the context lasts, on this thread."""
    watch = KernelWatch()
    multiply = NativeLinear.__call__

    def native(*args: Any, **kwargs: Any) -> torch.Tensor:
        watch.native.add("products")
        return multiply(*args, **kwargs)

    with monkeypatch.context() as patch, watch:
        patch.setattr(attention, "paged_attention", watch.attend)
        patch.setattr(NativeLinear, "__call__", native)
        yield watch
