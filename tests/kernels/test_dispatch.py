"""An op finds the kernel of its device, and every Triton kernel can stand in for its twin."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch

import baton_kernels
from baton_kernels import dispatch
from baton_kernels.dispatch import Op
from baton_kernels.kv_write import kv_write
from baton_kernels.paged_attention import AttentionSlice, plan_attention
from baton_kernels.sampling import penalize


def ops() -> list[Op]:  # type: ignore[type-arg]
    """All of the package."""
    names = [info.name for info in pkgutil.iter_modules(baton_kernels.__path__) if not info.ispkg]
    modules = [importlib.import_module(f"baton_kernels.{name}") for name in names]
    found = {
        (value.twin.__module__, value.twin.__name__): value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Op)
    }
    return list(found.values())


def test_an_op_without_a_kernel_is_its_twin() -> None:
    """No file of that name, and a file without that function."""
    for each in (kv_write, penalize):
        assert each.kernel("cuda") is each.twin
        assert each.__doc__ == each.twin.__doc__


def test_the_first_tensor_decides_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def kernel(self: Op, device_type: str) -> object:  # type: ignore[type-arg]
        asked.append(device_type)
        return self.twin

    monkeypatch.setattr(Op, "kernel", kernel)
    plan_attention([AttentionSlice(0, 1, 0, [0])], torch.zeros(1, 1, 2, 1, 16, 8), 1, 1.0, None)
    assert asked == ["cpu"]


def test_without_triton_a_cuda_tensor_takes_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
    for each in ops():
        assert Op(each.twin).kernel("cuda") is each.twin


def test_kernels_take_what_their_twins_take() -> None:
    """The same parameters in the same order; a kernel may have more, by keyword and with
    defaults."""
    pytest.importorskip("triton")
    kernels = [(each, each.kernel("cuda")) for each in ops()]
    replaced = [(each.twin, kernel) for each, kernel in kernels if kernel is not each.twin]
    assert len(replaced) >= 12
    for twin, kernel in replaced:
        assert kernel.__module__.startswith("baton_kernels.gpu.")
        wanted = list(inspect.signature(twin).parameters.values())
        got = list(inspect.signature(kernel).parameters.values())
        assert [p.name for p in got[: len(wanted)]] == [p.name for p in wanted]
        assert [p.default for p in got[: len(wanted)]] == [p.default for p in wanted]
        assert all(
            p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in got[len(wanted) :]
        )
